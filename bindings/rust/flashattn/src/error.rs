// SPDX-License-Identifier: Apache-2.0
use std::ffi::CStr;
use std::fmt;
use std::os::raw::c_char;

use flashattn_sys as sys;

/// Why a call was refused or failed: a status of `flashattn.h` and a sentence that names the argument.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Error {
    status: i32,
    text: String,
    cuda: i32,
}

/// What calls return.
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    pub(crate) fn new(status: sys::fa_status, text: impl Into<String>) -> Self {
        Error { status, text: text.into(), cuda: 0 }
    }

    /// The number, such as [`flashattn_sys::FA_ERROR_SHAPE`].
    pub fn status(&self) -> i32 {
        self.status
    }

    /// The constant's name, such as "FA_ERROR_SHAPE".
    pub fn name(&self) -> &'static str {
        if !sys::is_loaded() {
            return "FA_ERROR_NOT_BUILT"; // the one status there is without a library, see `load`
        }
        // SAFETY: returns a static string for any number.
        unsafe { CStr::from_ptr(sys::fa_status_name(self.status)) }.to_str().unwrap_or("FA_ERROR_UNKNOWN")
    }

    /// With [`flashattn_sys::FA_ERROR_CUDA`] the number of the CUDA error behind it (a `cudaError_t`), else 0.
    pub fn cuda_error(&self) -> i32 {
        self.cuda
    }

    /// What was wrong with this call.
    pub fn text(&self) -> &str {
        &self.text
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.name(), self.text)
    }
}

impl std::error::Error for Error {}

/// # Safety
/// `text` is a NUL-terminated string, valid during the call.
pub(crate) unsafe fn owned(text: *const c_char) -> String {
    CStr::from_ptr(text).to_string_lossy().into_owned()
}

/// # Safety
/// `ctx` is NULL or a live context of which this was the last call.
pub(crate) unsafe fn check(status: sys::fa_status, ctx: sys::fa_context) -> Result<()> {
    if status == sys::FA_OK {
        return Ok(());
    }
    let cuda = if status == sys::FA_ERROR_CUDA { sys::fa_last_cuda_error(ctx) } else { 0 };
    Err(Error { status, text: owned(sys::fa_last_error(ctx)), cuda })
}
