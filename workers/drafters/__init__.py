"""One module per kind of drafter, behind the small protocol of base.py."""
