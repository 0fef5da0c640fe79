"""`python -m tritandem.front --model NAME`: one worker, in front of a server that runs already."""

from .worker import main

main()
