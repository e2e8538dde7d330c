"""`python clients/pd_proxy ...` from a checkout, nothing installed: this directory is then the first of Python's path."""

from kvpool_pd_proxy.cli import main

if __name__ == "__main__":
    main()
