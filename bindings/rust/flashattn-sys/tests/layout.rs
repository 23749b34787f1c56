// SPDX-License-Identifier: Apache-2.0
//! The declarations against the loaded library and against a C compiler's view of the header.

use flashattn_sys::*;
use std::process::Command;

#[test]
fn sizes_equal_the_librarys() {
    let kinds = [
        FA_STRUCT_CONFIG,
        FA_STRUCT_DEVICE_PROPERTIES,
        FA_STRUCT_TENSOR,
        FA_STRUCT_ATTENTION,
        FA_STRUCT_GRADIENTS,
        FA_STRUCT_JVP,
        FA_STRUCT_PLAN_INFO,
        FA_STRUCT_APPEND,
        FA_STRUCT_MERGE_PROBLEM,
        FA_STRUCT_SCORE_SOURCE,
        FA_STRUCT_SCORE_TENSOR,
    ];
    load(None).unwrap();
    let layouts = layouts();
    // The library makes fa_score_position and fa_score_aux, the last two, and tells no size of them.
    assert_eq!(layouts.len(), kinds.len() + 2);
    for (layout, kind) in layouts.iter().zip(kinds) {
        assert_eq!(layout.size, unsafe { fa_sizeof(kind) }, "{}", layout.name);
    }
}

/// FLASHATTN_LAYOUT is a program, generated from flashattn.h, that prints `struct size` and `struct.field offset size` lines.
#[test]
fn every_field_lies_where_c_puts_it() {
    let program = match std::env::var_os("FLASHATTN_LAYOUT") {
        Some(program) => program,
        None => return eprintln!("skipped: FLASHATTN_LAYOUT is not set"),
    };
    let output = Command::new(program).output().expect("FLASHATTN_LAYOUT runs");
    assert!(output.status.success());
    let mut theirs: Vec<String> = String::from_utf8(output.stdout).unwrap().lines().map(str::to_owned).collect();
    let mut ours = Vec::new();
    for layout in layouts() {
        ours.push(format!("{} {}", layout.name, layout.size));
        for (field, offset, size) in layout.fields {
            ours.push(format!("{}.{} {} {}", layout.name, field, offset, size));
        }
    }
    assert!(ours.len() > 80);
    ours.sort();
    theirs.sort();
    assert_eq!(ours, theirs);
}
