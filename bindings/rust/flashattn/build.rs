// SPDX-License-Identifier: Apache-2.0
//! Lets the tests and examples of this crate find the library that flashattn-sys was linked with.

fn main() {
    if let Some(dir) = std::env::var_os("DEP_FLASHATTN_LIB_DIR") {
        println!("cargo:rustc-link-arg=-Wl,-rpath,{}", dir.to_string_lossy());
    }
}
