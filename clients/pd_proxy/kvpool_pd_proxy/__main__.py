"""`python -m kvpool_pd_proxy ...`."""

from kvpool_pd_proxy.cli import main

if __name__ == "__main__":
    main()
