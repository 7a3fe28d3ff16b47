//! Elements to and from bytes. A NaN keeps its payload as far as the target holds it, so that a file read and
//! written unchanged is the same file.

use std::ops::Range;

use half::{bf16, f16};

use crate::{DType, View};

/// Appends the elements in `bytes` as f32: exact but from f64 and large integers, which are rounded.
pub(crate) fn to_f32(dtype: DType, bytes: &[u8], out: &mut Vec<f32>) {
    match dtype {
        DType::F64 => out.extend(chunks(bytes).map(|b| f64::from_le_bytes(b) as f32)),
        DType::F32 => out.extend(chunks(bytes).map(f32::from_le_bytes)),
        DType::Bf16 => out.extend(chunks(bytes).map(|b| bf16_to_f32(u16::from_le_bytes(b)))),
        DType::F16 => out.extend(chunks(bytes).map(|b| f16_to_f32(u16::from_le_bytes(b)))),
        DType::I64 => out.extend(chunks(bytes).map(|b| i64::from_le_bytes(b) as f32)),
        DType::I32 => out.extend(chunks(bytes).map(|b| i32::from_le_bytes(b) as f32)),
        DType::U8 => out.extend(bytes.iter().map(|&b| f32::from(b))),
    }
}

/// Appends the elements in `bytes` as f64: exact but from large `i64`.
pub(crate) fn to_f64(dtype: DType, bytes: &[u8], out: &mut Vec<f64>) {
    match dtype {
        DType::F64 => out.extend(chunks(bytes).map(f64::from_le_bytes)),
        DType::I64 => out.extend(chunks(bytes).map(|b| i64::from_le_bytes(b) as f64)),
        DType::I32 => out.extend(chunks(bytes).map(|b| f64::from(i32::from_le_bytes(b)))),
        DType::F32 | DType::Bf16 | DType::F16 | DType::U8 => {
            let mut values = Vec::new();
            to_f32(dtype, bytes, &mut values);
            out.extend(values.into_iter().map(f64::from));
        }
    }
}

fn chunks<const N: usize>(bytes: &[u8]) -> impl Iterator<Item = [u8; N]> {
    bytes.as_chunks::<N>().0.iter().copied()
}

fn bf16_to_f32(bits: u16) -> f32 {
    // Not half's conversion, which quiets a signalling NaN.
    f32::from_bits(u32::from(bits) << 16)
}

fn f16_to_f32(bits: u16) -> f32 {
    match bits & 0x7c00 == 0x7c00 && bits & 0x03ff != 0 {
        true => {
            let sign = u32::from(bits & 0x8000) << 16;
            f32::from_bits(sign | 0x7f80_0000 | u32::from(bits & 0x03ff) << 13)
        }
        false => f16::from_bits(bits).to_f32(),
    }
}

/// The nearest bf16.
pub(crate) fn f32_to_bf16(value: f32) -> bf16 {
    match value.is_nan() {
        true => {
            let bits = (value.to_bits() >> 16) as u16;
            let quiet = if bits & 0x007f == 0 { 0x0040 } else { 0 };
            bf16::from_bits(bits | quiet)
        }
        false => bf16::from_f32(value),
    }
}

/// The nearest f16; infinite above 65504.
pub(crate) fn f32_to_f16(value: f32) -> f16 {
    match value.is_nan() {
        true => {
            let bits = value.to_bits();
            let (sign, payload) = ((bits >> 16) as u16 & 0x8000, (bits >> 13) as u16 & 0x03ff);
            f16::from_bits(sign | 0x7c00 | if payload == 0 { 0x0200 } else { payload })
        }
        false => f16::from_f32(value),
    }
}

/// Appends elements of host data in another float dtype. Returns `None` if either dtype is not float or
/// the data not on the host, `Some(false)` if a finite element became infinite.
pub(crate) fn encode(
    data: &View<'_>,
    range: Range<usize>,
    dtype: DType,
    out: &mut Vec<u8>,
) -> Option<bool> {
    if data.dtype() == dtype {
        let size = dtype.size();
        out.extend_from_slice(&data.host_bytes()?[range.start * size..range.end * size]);
        return Some(true);
    }
    if !matches!(dtype, DType::F64 | DType::F32 | DType::Bf16 | DType::F16) {
        return None;
    }
    let mut fits = true;
    match data {
        View::F64(s) => s[range]
            .iter()
            .for_each(|&x| fits &= push_f64(x, dtype, out)),
        View::F32(s) => s[range]
            .iter()
            .for_each(|&x| fits &= push_f32(x, dtype, out)),
        View::Bf16(s) => {
            (s[range].iter()).for_each(|x| fits &= push_f32(bf16_to_f32(x.to_bits()), dtype, out));
        }
        View::F16(s) => {
            (s[range].iter()).for_each(|x| fits &= push_f32(f16_to_f32(x.to_bits()), dtype, out));
        }
        _ => return None,
    }
    Some(fits)
}

fn push_f32(value: f32, dtype: DType, out: &mut Vec<u8>) -> bool {
    let infinite = match dtype {
        DType::F32 => {
            out.extend_from_slice(&value.to_le_bytes());
            false
        }
        DType::Bf16 => {
            let narrow = f32_to_bf16(value);
            out.extend_from_slice(&narrow.to_le_bytes());
            narrow.is_infinite()
        }
        DType::F16 => {
            let narrow = f32_to_f16(value);
            out.extend_from_slice(&narrow.to_le_bytes());
            narrow.is_infinite()
        }
        _ => return push_f64(value.into(), dtype, out),
    };
    !(infinite && value.is_finite())
}

fn push_f64(value: f64, dtype: DType, out: &mut Vec<u8>) -> bool {
    match dtype {
        DType::F64 => {
            out.extend_from_slice(&value.to_le_bytes());
            true
        }
        DType::F32 => {
            out.extend_from_slice(&(value as f32).to_le_bytes());
            value.is_infinite() || !(value as f32).is_infinite()
        }
        _ => push_f32(rounded_to_odd(value), dtype, out),
    }
}

/// f32 on the way from f64 to 16 bits: what is not exact has its last bit set, so that the second rounding knows
/// on which side of a tie the value lay (Boldo and Melquiond 2008). half's own conversion drops the low bits.
fn rounded_to_odd(value: f64) -> f32 {
    let nearest = value as f32;
    let back = f64::from(nearest);
    if back == value || value.is_nan() {
        return nearest;
    }
    let toward_zero = nearest.to_bits() - u32::from(back.abs() > value.abs());
    f32::from_bits(toward_zero | 1)
}
