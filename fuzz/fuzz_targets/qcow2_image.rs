#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| mqblk_fuzz_targets::qcow2_image::target(data));
