"""What measures and strains the project from outside: benchmarks, `soak`, `fuzz`, and what they share with the tests.

Never published; installed beside the project by `make`. Programs run as `python -m tritandem_bench.NAME`.
"""
