// SPDX-License-Identifier: Apache-2.0
//! Where the functions come from: the linker, or dlopen.

/// Declares the functions as the linker's.
#[cfg(not(feature = "dynamic-loading"))]
macro_rules! functions {
    ($(pub fn $name:ident($($argument:ident: $type:ty),* $(,)?) $(-> $result:ty)?;)*) => {
        extern "C" {
            $(pub fn $name($($argument: $type),*) $(-> $result)?;)*
        }
    };
}

/// Declares the functions as calls through a table that `load` fills.
#[cfg(feature = "dynamic-loading")]
macro_rules! functions {
    ($(pub fn $name:ident($($argument:ident: $type:ty),* $(,)?) $(-> $result:ty)?;)*) => {
        pub(crate) struct Table {
            $($name: unsafe extern "C" fn($($type),*) $(-> $result)?,)*
        }

        impl Table {
            /// # Safety
            /// `find` returns the addresses of the functions of flashattn.h.
            pub(crate) unsafe fn fill(find: impl Fn(&str) -> Result<*mut c_void, String>) -> Result<Table, String> {
                type Address = *mut c_void;
                Ok(Table {
                    $($name: std::mem::transmute::<Address, unsafe extern "C" fn($($type),*) $(-> $result)?>(find(
                        stringify!($name),
                    )?),)*
                })
            }
        }

        $(
            /// # Safety
            /// As for the function of this name in `flashattn.h`.
            ///
            /// # Panics
            /// If the library is not loaded; see [`load`].
            pub unsafe fn $name($($argument: $type),*) $(-> $result)? {
                (library::table().$name)($($argument),*)
            }
        )*
    };
}

pub(crate) use functions;

#[cfg(not(feature = "dynamic-loading"))]
mod linked {
    use std::path::Path;

    /// Does nothing: the library is linked. With the feature `dynamic-loading` it is opened here.
    ///
    /// # Errors
    /// None.
    pub fn load(_path: Option<&Path>) -> Result<(), String> {
        Ok(())
    }

    /// Always, since the library is linked.
    pub fn is_loaded() -> bool {
        true
    }
}
#[cfg(not(feature = "dynamic-loading"))]
pub use linked::{is_loaded, load};

#[cfg(feature = "dynamic-loading")]
mod opened {
    use std::ffi::{CStr, CString, OsStr};
    use std::os::raw::{c_char, c_int, c_void};
    use std::os::unix::ffi::OsStrExt;
    use std::path::Path;
    use std::ptr::null_mut;
    use std::sync::atomic::{AtomicPtr, Ordering};

    use crate::{fa_tensor, Table, FA_STRUCT_TENSOR};

    extern "C" {
        fn dlopen(path: *const c_char, mode: c_int) -> *mut c_void;
        fn dlsym(handle: *mut c_void, name: *const c_char) -> *mut c_void;
        fn dlerror() -> *const c_char;
    }
    const RTLD_NOW: c_int = 2;

    static TABLE: AtomicPtr<Table> = AtomicPtr::new(null_mut());

    fn last_error() -> String {
        // SAFETY: after a failure of this thread dlerror returns its text.
        unsafe { CStr::from_ptr(dlerror()) }.to_string_lossy().into_owned()
    }

    /// Opens the library: the file at `path`, else the one named by the environment's `FLASHATTN_LIBRARY`, else `libflashattn.so.0` where the
    /// system looks. Once it is open, further calls do nothing. It stays open until the process ends.
    ///
    /// # Errors
    /// The system's words, or what the file lacks.
    pub fn load(path: Option<&Path>) -> Result<(), String> {
        if is_loaded() {
            return Ok(());
        }
        let chosen = std::env::var_os("FLASHATTN_LIBRARY");
        let name = path.map(Path::as_os_str).or(chosen.as_deref()).unwrap_or_else(|| OsStr::new("libflashattn.so.0"));
        let text = CString::new(name.as_bytes()).map_err(|_| format!("{:?} holds a NUL", name))?;
        // SAFETY: plain calls of the dynamic linker; the table is filled only from a library that has every function.
        let table = unsafe {
            let handle = dlopen(text.as_ptr(), RTLD_NOW);
            if handle.is_null() {
                return Err(last_error());
            }
            Table::fill(|function| {
                let function = CString::new(function).expect("names of functions hold no NUL");
                let address = dlsym(handle, function.as_ptr());
                if address.is_null() {
                    Err(last_error())
                } else {
                    Ok(address)
                }
            })?
        };
        let table = Box::into_raw(Box::new(table));
        if TABLE.compare_exchange(null_mut(), table, Ordering::AcqRel, Ordering::Acquire).is_err() {
            // SAFETY: another thread was first; this table was never seen by anyone.
            drop(unsafe { Box::from_raw(table) });
        }
        // SAFETY: the library is open.
        let theirs = unsafe { crate::fa_sizeof(FA_STRUCT_TENSOR) };
        if theirs != std::mem::size_of::<fa_tensor>() {
            TABLE.store(null_mut(), Ordering::Release);
            return Err(format!("{:?}: its fa_tensor has {} bytes", name, theirs));
        }
        Ok(())
    }

    /// Whether [`load`] has succeeded.
    pub fn is_loaded() -> bool {
        !TABLE.load(Ordering::Acquire).is_null()
    }

    pub(crate) fn table() -> &'static Table {
        let table = TABLE.load(Ordering::Acquire);
        assert!(!table.is_null(), "libflashattn is not loaded: flashattn_sys::load was not called, or failed");
        // SAFETY: tables are never freed once they can be seen.
        unsafe { &*table }
    }
}
#[cfg(feature = "dynamic-loading")]
pub(crate) use opened::table;
#[cfg(feature = "dynamic-loading")]
pub use opened::{is_loaded, load};
