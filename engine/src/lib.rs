//! Worker threads, queue life cycle, poll policy and statistics
#![forbid(unsafe_code)]
