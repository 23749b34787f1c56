// SPDX-License-Identifier: Apache-2.0
//! Links libflashattn: from FLASHATTN_LIB_DIR if it is set, else from wherever the linker looks by itself.

use std::env;
use std::path::Path;

fn main() {
    println!("cargo:rerun-if-env-changed=FLASHATTN_LIB_DIR");
    if let Some(dir) = env::var_os("FLASHATTN_LIB_DIR") {
        let dir = Path::new(&dir).canonicalize().unwrap_or_else(|error| panic!("FLASHATTN_LIB_DIR={:?}: {}", dir, error));
        println!("cargo:rustc-link-search=native={}", dir.display());
        println!("cargo:rustc-link-arg=-Wl,-rpath,{}", dir.display()); // for the tests of this crate
        println!("cargo:lib_dir={}", dir.display()); // DEP_FLASHATTN_LIB_DIR of dependent crates
    }
    println!("cargo:rustc-link-lib=dylib=flashattn");
}
