//! Guest memory: regions, translation, shared ring cells, buffers with leases
