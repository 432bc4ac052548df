"""The router: sequences, rounds, commits, dispatch and failover."""
