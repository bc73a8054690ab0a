//! kvlab: a research workbench for KV-cache compression.
