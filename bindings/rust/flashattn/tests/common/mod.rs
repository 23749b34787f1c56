// SPDX-License-Identifier: Apache-2.0
//! What tests share.

/// Numbers between -1 and 1 without a visible pattern.
pub fn numbers(seed: u64, count: usize) -> Vec<f32> {
    let mut state = seed;
    (0..count)
        .map(|_| {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (state >> 40) as f32 / (1u64 << 23) as f32 - 1.0
        })
        .collect()
}
