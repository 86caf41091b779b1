#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| o2poll_tests::hostile::connection(bytes));
