// SPDX-License-Identifier: Apache-2.0
//! A program that does without the library until it is there. FLASHATTN_TEST_LIBRARY names it.
#![cfg(feature = "dynamic-loading")]

use std::env;
use std::path::Path;

#[test]
fn a_missing_library_is_an_error_and_a_present_one_works() {
    let library = env::var("FLASHATTN_TEST_LIBRARY").expect("FLASHATTN_TEST_LIBRARY names the library");
    for missing in ["/nonexistent/libflashattn.so", "libm.so.6"] {
        let error = flashattn::load(Some(Path::new(missing))).unwrap_err();
        assert_eq!(error.name(), "FA_ERROR_NOT_BUILT");
        assert!(error.text().contains("nonexistent") || error.text().contains("fa_status_name"), "{}", error);
    }
    flashattn::load(Some(Path::new(&library))).unwrap();
    flashattn::load(Some(Path::new("/nonexistent/again"))).unwrap(); // it is loaded already
    assert!(flashattn::build_info().contains(flashattn::version()));
    assert!(flashattn::Context::new().unwrap().device().unwrap().threads > 0);
}
