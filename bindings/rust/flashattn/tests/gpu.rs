// SPDX-License-Identifier: Apache-2.0
//! A step over a cache, forward and backward in memory of a GPU, against the same on the CPU. Does nothing where there is no GPU.

use std::ffi::{c_void, CStr};
use std::mem::{size_of_val, transmute_copy};
use std::os::raw::{c_char, c_int, c_uint};
use std::ptr::null_mut;

use flashattn::{Append, Attention, Bf16, Context, CudaSettings, Gradients, TensorView, TensorViewMut};

extern "C" {
    fn dlopen(path: *const c_char, mode: c_int) -> *mut c_void;
    fn dlsym(handle: *mut c_void, name: *const c_char) -> *mut c_void;
}

type Address = u64; // CUdeviceptr

/// A few functions of the CUDA driver.
struct Driver {
    library: *mut c_void,
}

impl Driver {
    /// Device 0, current on this thread.
    fn new() -> Self {
        // SAFETY: as cuda.h declares these functions.
        unsafe {
            let library = dlopen(c("libcuda.so.1\0"), 2);
            assert!(!library.is_null(), "there is a GPU, but no driver");
            let driver = Driver { library };
            let init: unsafe extern "C" fn(c_uint) -> c_int = driver.function("cuInit\0");
            let get: unsafe extern "C" fn(*mut c_int, c_int) -> c_int = driver.function("cuDeviceGet\0");
            let retain: unsafe extern "C" fn(*mut *mut c_void, c_int) -> c_int = driver.function("cuDevicePrimaryCtxRetain\0");
            let current: unsafe extern "C" fn(*mut c_void) -> c_int = driver.function("cuCtxSetCurrent\0");
            let (mut device, mut context) = (0, null_mut());
            assert_eq!((init(0), get(&mut device, 0), retain(&mut context, device), current(context)), (0, 0, 0, 0));
            driver
        }
    }

    /// # Safety
    /// F is the type of that function.
    unsafe fn function<F>(&self, name: &str) -> F {
        let function = dlsym(self.library, c(name));
        assert!(!function.is_null(), "the driver has no {}", name);
        transmute_copy(&function)
    }

    /// A copy of a slice in memory of the device, which ends with the process.
    fn copy<T>(&self, data: &[T]) -> Address {
        let (mut address, bytes) = (0, size_of_val(data));
        // SAFETY: as cuda.h declares these functions; the memory has room for the slice.
        unsafe {
            let alloc: unsafe extern "C" fn(*mut Address, usize) -> c_int = self.function("cuMemAlloc_v2\0");
            let write: unsafe extern "C" fn(Address, *const c_void, usize) -> c_int = self.function("cuMemcpyHtoD_v2\0");
            assert_eq!((alloc(&mut address, bytes), write(address, data.as_ptr().cast(), bytes)), (0, 0));
        }
        self.wait(null_mut()); // the bytes may still be on their way, and the test's stream does not wait for them
        address
    }

    fn read<T: Copy + Default>(&self, address: Address, count: usize) -> Vec<T> {
        let mut data = vec![T::default(); count];
        // SAFETY: as cuda.h declares the function; tests read as many numbers as they copied.
        unsafe {
            let read: unsafe extern "C" fn(*mut c_void, Address, usize) -> c_int = self.function("cuMemcpyDtoH_v2\0");
            assert_eq!(read(data.as_mut_ptr().cast(), address, size_of_val(&data[..])), 0);
        }
        data
    }

    /// A stream that does not wait for the default stream.
    fn stream(&self) -> *mut c_void {
        let mut stream = null_mut();
        // SAFETY: as cuda.h declares the function.
        unsafe {
            let create: unsafe extern "C" fn(*mut *mut c_void, c_uint) -> c_int = self.function("cuStreamCreate\0");
            assert_eq!(create(&mut stream, 1), 0);
        }
        stream
    }

    fn wait(&self, stream: *mut c_void) {
        // SAFETY: as cuda.h declares the function.
        unsafe {
            let wait: unsafe extern "C" fn(*mut c_void) -> c_int = self.function("cuStreamSynchronize\0");
            assert_eq!(wait(stream), 0);
        }
    }
}

fn c(name: &str) -> *const c_char {
    CStr::from_bytes_with_nul(name.as_bytes()).unwrap().as_ptr()
}

const ROWS: usize = 70;
const HEADS: usize = 2;
const DIM: usize = 64;
const CAPACITY: usize = 128;
const COUNT: usize = ROWS * HEADS * DIM;
const SHAPE: [usize; 4] = [1, ROWS, HEADS, DIM];
const LSE_SHAPE: [usize; 3] = [1, HEADS, ROWS];

fn numbers(step: usize) -> Vec<Bf16> {
    (0..COUNT).map(|i| Bf16::from((i * step % 101) as f32 / 50.0 - 1.0)).collect()
}

fn assert_close<T: Copy + Into<f32>>(what: &str, got: &[T], expected: &[T]) {
    for (i, (&got, &expected)) in got.iter().zip(expected).enumerate() {
        let (got, expected): (f32, f32) = (got.into(), expected.into());
        assert!((got - expected).abs() <= 0.03 * expected.abs().max(1.0), "{}[{}]: {}, on the CPU {}", what, i, got, expected);
    }
}

#[test]
fn a_step_on_a_gpu_equals_the_cpus() {
    // SAFETY: what calls get below is memory of device 0 that ends with the process.
    let mut gpu = match unsafe { Context::cuda(CudaSettings::default()) } {
        Ok(context) => context,
        Err(error) => return println!("no GPU: {}", error),
    };
    let driver = Driver::new();
    let stream = driver.stream();
    let host = Context::new().unwrap();
    let (q, k, v, dout) = (numbers(7), numbers(11), numbers(13), numbers(17));

    let view = |x| TensorView::new(x, &SHAPE).unwrap();
    let attention = Attention::new(view(&q), view(&k), view(&v)).causal();
    let (mut out, mut lse) = (vec![Bf16::default(); COUNT], vec![0f32; HEADS * ROWS]);
    let (mut dq, mut dk, mut dv) = (out.clone(), out.clone(), out.clone());
    {
        let mut out = TensorViewMut::new(&mut out, &SHAPE).unwrap();
        let mut lse = TensorViewMut::new(&mut lse, &LSE_SHAPE).unwrap();
        let mut gradients = Gradients::new(view(&dout))
            .dq(TensorViewMut::new(&mut dq, &SHAPE).unwrap())
            .dk(TensorViewMut::new(&mut dk, &SHAPE).unwrap())
            .dv(TensorViewMut::new(&mut dv, &SHAPE).unwrap());
        host.forward(&attention, &mut out, Some(&mut lse)).unwrap();
        host.backward(&attention, out.as_view(), lse.as_view(), &mut gradients).unwrap();
    }

    let on = |address: Address| {
        // SAFETY: as above; COUNT numbers lie there.
        unsafe { TensorView::from_ptr(address as *const Bf16, &SHAPE) }.unwrap()
    };
    let on_mut = |address: Address| {
        // SAFETY: as above; COUNT numbers lie there, and nothing else writes them.
        unsafe { TensorViewMut::from_ptr(address as *mut Bf16, &SHAPE) }.unwrap()
    };
    let zeros = vec![Bf16::default(); COUNT];
    let results: Vec<Address> = (0..4).map(|_| driver.copy(&zeros)).collect();
    let lse_address = driver.copy(&vec![0f32; HEADS * ROWS]);
    let k_address = driver.copy(&k);
    let attention = Attention::new(on(driver.copy(&q)), on(k_address), on(driver.copy(&v))).causal().deterministic();
    {
        let mut out = on_mut(results[0]);
        // SAFETY: as above.
        let mut lse = unsafe { TensorViewMut::from_ptr(lse_address as *mut f32, &LSE_SHAPE) }.unwrap();
        let mut gradients =
            Gradients::new(on(driver.copy(&dout))).dq(on_mut(results[1])).dk(on_mut(results[2])).dv(on_mut(results[3]));
        let forward = gpu.query_forward(&attention, &out, Some(&lse)).unwrap();
        let backward = gpu.query_backward(&attention, out.as_view(), lse.as_view(), &gradients).unwrap();
        println!("{}, {}", forward.kernel, backward.kernel);
        let bytes = forward.workspace_bytes.max(backward.workspace_bytes) as usize;
        let workspace = driver.copy(&vec![0u8; bytes + 1]);
        // SAFETY: the stream and the workspace end with the process, and nothing else uses them.
        unsafe {
            gpu.set_stream(stream);
            gpu.set_workspace(workspace as *mut c_void, bytes);
        }
        gpu.prepare_forward(&attention, &out, Some(&lse)).unwrap();
        gpu.prepare_backward(&attention, out.as_view(), lse.as_view(), &gradients).unwrap();
        gpu.forward(&attention, &mut out, Some(&mut lse)).unwrap();
        gpu.backward(&attention, out.as_view(), lse.as_view(), &mut gradients).unwrap();
    }
    driver.wait(stream);
    assert_close("lse", &driver.read::<f32>(lse_address, HEADS * ROWS), &lse);
    for (name, address, expected) in
        [("out", results[0], &out), ("dq", results[1], &dq), ("dk", results[2], &dk), ("dv", results[3], &dv)]
    {
        assert_close(name, &driver.read::<Bf16>(address, COUNT), expected);
    }

    // The keys as new rows of a cache, after 10 others, bit for bit; and a part merged with itself, which is that part.
    let cache = driver.copy(&vec![Bf16::default(); CAPACITY * HEADS * DIM]);
    let (offsets, used) = (driver.copy(&[10i32]), driver.copy(&[0i32]));
    // SAFETY: as above.
    unsafe {
        let k_cache = TensorViewMut::from_ptr(cache as *mut Bf16, &[1, CAPACITY, HEADS, DIM]).unwrap();
        let mut append = Append::new(on(k_address), k_cache)
            .offsets(TensorView::from_ptr(offsets as *const i32, &[1]).unwrap())
            .seqused_k(TensorViewMut::from_ptr(used as *mut i32, &[1]).unwrap());
        gpu.append_kv(&mut append).unwrap();
        let part = (on(results[0]), TensorView::from_ptr(lse_address as *const f32, &LSE_SHAPE).unwrap());
        gpu.merge(&[part, part], &mut on_mut(results[1]), None).unwrap();
    }
    driver.wait(stream);
    assert_eq!(driver.read::<i32>(used, 1), [10 + ROWS as i32]);
    let mut expected = vec![Bf16::default(); CAPACITY * HEADS * DIM];
    expected[10 * HEADS * DIM..(10 + ROWS) * HEADS * DIM].copy_from_slice(&k);
    assert!(driver.read::<Bf16>(cache, expected.len()) == expected);
    assert_close("merged", &driver.read::<Bf16>(results[1], COUNT), &out);
}
