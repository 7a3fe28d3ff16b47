//! Flat passes.

use drivetrain_kernels::cuda::ops::elementwise::{
    SUM_OF_SQUARES_SCRATCH, add, add_assign, axpy, bf16_to_f32, f32_to_bf16, scale, sum_of_squares,
};
use drivetrain_kernels::cuda::{CudaError, Device};
use half::bf16;

use crate::testing::random;
use crate::{Case, filled, poisoned};

pub(crate) const CASES: &[Case] = &[
    ("elementwise::sums_of_squares", sums),
    ("elementwise::one_bad_element_is_found", one_bad_element),
    ("elementwise::additions_and_scaling", additions),
    ("elementwise::bf16", casts),
];

const LENGTHS: [usize; 4] = [0, 1, 37, 16_385];

fn sum(device: &Device, x: &[f32]) -> Result<f64, CudaError> {
    let mut scratch = device.uninit::<f64>(SUM_OF_SQUARES_SCRATCH)?;
    let mut total = filled(device, 1, f64::NAN)?;
    sum_of_squares(
        device,
        device.upload(x)?.view(),
        &mut scratch,
        total.view_mut(),
    )?;
    Ok(total.read()?[0])
}

fn sums(device: &Device) -> Result<(), CudaError> {
    // The last is more than one element a thread of the largest grid.
    for len in LENGTHS.into_iter().chain([300_000]) {
        let x = random(1, len);
        let exact: f64 = x.iter().map(|&x| f64::from(x).powi(2)).sum();
        let found = sum(device, &x)?;
        assert!(
            (found - exact).abs() <= 1e-12 * exact,
            "{len}: {found} for {exact}"
        );
    }
    Ok(())
}

fn one_bad_element(device: &Device) -> Result<(), CudaError> {
    for at in [0, 31, 32, 256, 5000] {
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut x = vec![1e38; 5001];
            assert!(sum(device, &x)?.is_finite());
            x[at] = bad;
            assert!(!sum(device, &x)?.is_finite(), "{bad} at {at}");
        }
    }
    Ok(())
}

fn additions(device: &Device) -> Result<(), CudaError> {
    for len in LENGTHS {
        let (x, y) = (random(1, len), random(2, len));
        let (x_device, y_device) = (device.upload(&x)?, device.upload(&y)?);
        let mut out = poisoned(device, len)?;
        add(device, x_device.view(), y_device.view(), out.view_mut())?;
        let expected: Vec<f32> = x.iter().zip(&y).map(|(x, y)| x + y).collect();
        assert_eq!(out.read()?, expected);
        out.write(&y)?;
        add_assign(device, out.view_mut(), x_device.view())?;
        assert_eq!(out.read()?, expected);
        out.write(&y)?;
        axpy(device, -0.5, x_device.view(), out.view_mut())?;
        scale(device, 4.0, out.view_mut())?;
        let halves: Vec<f32> = x.iter().zip(&y).map(|(x, y)| 4.0 * (y - 0.5 * x)).collect();
        assert_eq!(out.read()?, halves);
    }
    Ok(())
}

fn casts(device: &Device) -> Result<(), CudaError> {
    let mut x = random(1, 500);
    x.extend([0.0, -0.0, f32::INFINITY, f32::NEG_INFINITY, f32::MAX, 1e-40]);
    x.extend([
        1.0 + 1.0 / 256.0,
        1.0 + 3.0 / 256.0,
        f32::from_bits(0x7f80_0001),
        f32::NAN,
    ]);
    let mut y = filled(device, x.len(), bf16::ZERO)?;
    f32_to_bf16(device, device.upload(&x)?.view(), y.view_mut())?;
    let mut back = filled(device, x.len(), 0.0)?;
    bf16_to_f32(device, y.view(), back.view_mut())?;
    for ((&x, &y), &back) in x.iter().zip(&y.read()?).zip(&back.read()?) {
        if x.is_nan() {
            assert!(y.is_nan() && back.is_nan());
        } else {
            assert_eq!(y, bf16::from_f32(x));
            assert_eq!(back.to_bits(), y.to_f32().to_bits());
        }
    }
    Ok(())
}
