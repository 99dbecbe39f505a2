"""What the WAN benches share: actors (a process per node, in its namespace) and the printing of lines against bars."""
