//! Ops by slices: those of unified memory by address, others by copies.

use drivetrain_kernels::cuda::{CudaError, Device, Unified};
use drivetrain_kernels::ops::elementwise;
use drivetrain_kernels::ops::gemm::{Gemm, gemm};
use drivetrain_kernels::ops::swiglu;
use drivetrain_kernels::{Cpu, Memory, On, Processor, Rows, RowsMut};

use crate::Case;
use crate::testing::{assert_close, random, wide};

pub(crate) const CASES: &[Case] = &[
    ("unified::bands", bands),
    ("unified::products", products),
    ("unified::memory", memory),
];

/// Rows of these, cut from a buffer that is wider by 3 columns.
const TOKENS: usize = 5;
const WIDTH: usize = 37;
const STRIDE: usize = 2 * WIDTH + 3;

/// dgate, dup and what lies beside them, from inputs in the processor's memory.
fn swiglu_backward(on: On<'_>, memory: impl Fn(Vec<f32>) -> Memory) -> Memory {
    let dy = memory(random(1, TOKENS * WIDTH));
    let gate_up = memory(random(2, TOKENS * STRIDE));
    let mut d_gate_up = memory(vec![7.0; TOKENS * STRIDE]);
    let bands = Rows::new(&gate_up, TOKENS, 2 * WIDTH, STRIDE);
    let (gate, up) = (bands.columns(0..WIDTH), bands.columns(WIDTH..2 * WIDTH));
    let [dgate, dup] =
        RowsMut::new(&mut d_gate_up, TOKENS, 2 * WIDTH, STRIDE).split_columns([WIDTH, WIDTH]);
    swiglu::backward(on, &dy, gate, up, dgate, dup);
    d_gate_up
}

/// Two bands of one buffer, written by one op: neither touches the other, nor what lies beyond both.
fn bands(device: &Device) -> Result<(), CudaError> {
    let processor = Processor::Device(Unified::new(device.clone()));
    let expected = wide(&swiglu_backward(Cpu::new(1).into(), Memory::from));
    let copied = swiglu_backward(processor.on(), Memory::from);
    assert_close("bands of the host", &copied, &expected, 1e-6);
    let in_place = swiglu_backward(processor.on(), |data| processor.adopt(data));
    assert_close("bands of unified memory", &in_place, &expected, 1e-6);
    processor.check()
}

/// C of a wider buffer, by every mixture of host and unified memory; an empty sum; nothing at all.
fn products(device: &Device) -> Result<(), CudaError> {
    let processor = Processor::Device(Unified::new(device.clone()));
    let dims = Gemm::nt(4, 6, 5).strides(7, 5, 9).accumulate(true);
    let [a, b, c] = [4 * 7, 6 * 5, 4 * 9].map(|len| random(len as u64, len));
    let mut expected = c.clone();
    gemm(Cpu::new(1), &dims, &a, &b, &mut expected);
    for mixture in 0..8 {
        let place = |bit: u32, data: &[f32]| match mixture >> bit & 1 {
            0 => Memory::from(data.to_vec()),
            _ => processor.adopt(data.to_vec()),
        };
        let (a, b, mut c) = (place(0, &a), place(1, &b), place(2, &c));
        gemm(&processor, &dims, &a, &b, &mut c);
        assert_close(&format!("C, {mixture:03b}"), &c, &wide(&expected), 1e-6);
    }
    let mut sum = vec![f32::NAN; 6];
    gemm(&processor, &Gemm::nn(2, 3, 0), &[], &[], &mut sum);
    assert_eq!(sum, [0.0; 6]);
    gemm(&processor, &Gemm::nn(0, 0, 4), &[], &[], &mut []);
    processor.check()
}

/// Host and device see each other's writes, copies are copies, and sums come back.
fn memory(device: &Device) -> Result<(), CudaError> {
    let processor = Processor::Device(Unified::new(device.clone()));
    let mut x = processor.adopt(random(3, 1000));
    let mut y = processor.zeros(1000);
    elementwise::axpy(&processor, 2.0, &x, &mut y);
    let doubled: Vec<f32> = x.iter().map(|x| 2.0 * x).collect();
    assert_eq!(*y, *doubled);
    let copy = y.clone();
    x.fill(1.0);
    y[10..20].fill(3.0);
    elementwise::add_assign(&processor, &mut y[5..20], &x[..15]);
    assert_eq!(y[4], copy[4]);
    assert_eq!(y[5], copy[5] + 1.0);
    assert_eq!(y[19], 4.0);
    let squares = elementwise::sum_of_squares(&processor, &x[..7]);
    assert_eq!((squares.sum, squares.finite), (7.0, true));
    assert_eq!(elementwise::sum_of_squares(&processor, &[]).sum, 0.0);
    assert_eq!(copy.into_vec(), doubled);
    processor.check()
}
