//! A safe io_uring: buffers owned until their completion, fixed files and buffers
