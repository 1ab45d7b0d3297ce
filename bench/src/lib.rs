//! Load generator, sweeps and reports
#![forbid(unsafe_code)]
