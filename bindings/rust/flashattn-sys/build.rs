// SPDX-License-Identifier: Apache-2.0
//! Links libflashattn: from FLASHATTN_LIB_DIR if it is set, else as pkg-config says, else from wherever the linker looks by itself. With the
//! feature `dynamic-loading` nothing is linked.

use std::env;
use std::path::{Path, PathBuf};
use std::process::Command;

fn main() {
    for variable in ["FLASHATTN_LIB_DIR", "PKG_CONFIG", "PKG_CONFIG_PATH"] {
        println!("cargo:rerun-if-env-changed={}", variable);
    }
    if env::var_os("CARGO_FEATURE_DYNAMIC_LOADING").is_some() {
        return;
    }
    if let Some(dir) = env::var_os("FLASHATTN_LIB_DIR") {
        let dir = Path::new(&dir).canonicalize().unwrap_or_else(|error| panic!("FLASHATTN_LIB_DIR={:?}: {}", dir, error));
        link_from(&dir);
    } else if let Some(dir) = pkg_config() {
        link_from(&dir);
    }
    println!("cargo:rustc-link-lib=dylib=flashattn");
}

fn link_from(dir: &Path) {
    println!("cargo:rustc-link-search=native={}", dir.display());
    println!("cargo:rustc-link-arg=-Wl,-rpath,{}", dir.display()); // for the tests of this crate
    println!("cargo:lib_dir={}", dir.display()); // DEP_FLASHATTN_LIB_DIR of dependent crates
}

/// The folder of the library that pkg-config knows; None without pkg-config or without the library.
fn pkg_config() -> Option<PathBuf> {
    let program = env::var_os("PKG_CONFIG").unwrap_or_else(|| "pkg-config".into());
    let asked = Command::new(program).args(["--variable=libdir", "flashattn"]).output().ok()?;
    let dir = String::from_utf8(asked.stdout).ok()?;
    let dir = Path::new(dir.trim());
    // pkg-config may write the path with dots in it.
    if asked.status.success() && !dir.as_os_str().is_empty() {
        dir.canonicalize().ok()
    } else {
        None
    }
}
