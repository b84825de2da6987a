"""Published figures and ours side by side, table by table: `make papers`, or one of them, `make papers TABLE=name`."""
