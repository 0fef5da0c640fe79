"""What measures the project from outside, and the stand-ins that benchmarks share with the tests.

Never published; installed beside the project by `make`. Programs run as `python -m tritandem_bench.NAME`.
"""
