//! The `kvlab` program.

fn main() {}
