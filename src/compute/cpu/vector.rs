//! Element-wise kernels and reductions with a fixed order, compiled for several instruction sets and chosen at run time.
//!
//! Invariant: a body is written once with explicit lanes and fused multiply-adds, so AVX-512, AVX2 and plain code give
//! the same bits.

pub(crate) use super::dispatch::multiversion;

/// Lanes of every reduction in this module.
pub const LANES: usize = 16;

const LOG2_E: f32 = std::f32::consts::LOG2_E;
// ln 2 in two parts, so that n·ln 2 loses nothing for |n| < 2^8.
const LN2_HI: f32 = 0.693_359_4;
const LN2_LO: f32 = -2.121_944_4e-4;
// 1.5 · 2^23: adding and subtracting it rounds to the nearest integer.
const ROUND: f32 = 12_582_912.0;

/// eˣ for x ≤ 0, within 2 ulp; below −87 it is 0. (Softmax never asks for more.)
#[inline(always)]
pub fn exp_nonpositive(x: f32) -> f32 {
    let y = x.max(-87.0);
    let shifted = y.mul_add(LOG2_E, ROUND);
    let n = shifted - ROUND;
    let r = n.mul_add(-LN2_LO, n.mul_add(-LN2_HI, y));
    // Taylor coefficients to degree 7: |r| ≤ ln 2 / 2 leaves 3e-9 relative.
    let mut p = 1.0 / 5040.0;
    p = r.mul_add(p, 1.0 / 720.0);
    p = r.mul_add(p, 1.0 / 120.0);
    p = r.mul_add(p, 1.0 / 24.0);
    p = r.mul_add(p, 1.0 / 6.0);
    p = r.mul_add(p, 0.5);
    p = r.mul_add(p, 1.0);
    p = r.mul_add(p, 1.0);
    // The shifted number's mantissa ends in n: no conversion, which would have to saturate.
    let exponent = shifted.to_bits().wrapping_sub(ROUND.to_bits() - 127);
    let scale = f32::from_bits(exponent << 23);
    if x < -87.0 { 0.0 } else { p * scale }
}

#[inline(always)]
fn max_body(x: &[f32]) -> f32 {
    let mut lanes = [f32::NEG_INFINITY; LANES];
    let chunks = x.chunks_exact(LANES);
    let rest = chunks.remainder();
    for c in chunks {
        for (m, &v) in lanes.iter_mut().zip(c) {
            *m = if v > *m { v } else { *m };
        }
    }
    let all = lanes.iter().chain(rest);
    all.fold(f32::NEG_INFINITY, |m, &v| if v > m { v } else { m })
}

multiversion! {
    /// The largest element; −∞ for an empty slice. NaN is ignored.
    pub fn max(x: &[f32]) -> f32 = max_body;
}

#[inline(always)]
fn exp_sum_body(x: &mut [f32], shift: f32) -> f32 {
    let mut lanes = [0.0f32; LANES];
    let mut chunks = x.chunks_exact_mut(LANES);
    for c in &mut chunks {
        for (s, v) in lanes.iter_mut().zip(c) {
            *v = exp_nonpositive(*v - shift);
            *s += *v;
        }
    }
    for (s, v) in lanes.iter_mut().zip(chunks.into_remainder()) {
        *v = exp_nonpositive(*v - shift);
        *s += *v;
    }
    sum_lanes(&lanes)
}

/// Lane sums in one fixed tree.
#[inline(always)]
pub fn sum_lanes(lanes: &[f32; LANES]) -> f32 {
    let mut s = *lanes;
    let mut width = LANES / 2;
    while width > 0 {
        for i in 0..width {
            s[i] += s[i + width];
        }
        width /= 2;
    }
    s[0]
}

multiversion! {
    /// Replaces x by e^(x − shift) and returns the sum. `shift` is at least the largest element.
    pub fn exp_sum(x: &mut [f32], shift: f32) -> f32 = exp_sum_body;
}

#[inline(always)]
fn exp_rows_body(x: &mut [f32], (stride, n): (usize, usize), m: &mut [f32], l: &mut [f32]) {
    for ((row, m), l) in x.chunks_exact_mut(stride).zip(m).zip(l) {
        *m = max_body(&row[..n]);
        *l = exp_sum_body(&mut row[..n], *m);
    }
}

multiversion! {
    /// For each row, `stride` numbers apart: its first n numbers' largest one m, e^(x − m) in their place, and the sum l.
    pub fn exp_rows(x: &mut [f32], shape: (usize, usize), m: &mut [f32], l: &mut [f32]) = exp_rows_body;
}

// Channels that stay in registers while all rows pass.
pub(super) const CHANNELS: usize = 4 * LANES;

#[inline(always)]
fn axpy_rows_body(p: &[f32], rows: &[f32], acc: &mut [f32]) {
    let dim = acc.len();
    for (c, acc) in acc.chunks_mut(CHANNELS).enumerate() {
        let first = c * CHANNELS;
        let Ok(sums) = <&mut [f32; CHANNELS]>::try_from(&mut *acc) else {
            for (&w, row) in p.iter().zip(rows.chunks_exact(dim)) {
                for (a, &v) in acc.iter_mut().zip(&row[first..]) {
                    *a = w.mul_add(v, *a);
                }
            }
            continue;
        };
        let mut held = *sums;
        for (&w, row) in p.iter().zip(rows.chunks_exact(dim)) {
            for (a, &v) in held.iter_mut().zip(&row[first..first + CHANNELS]) {
                *a = w.mul_add(v, *a);
            }
        }
        *sums = held;
    }
}

multiversion! {
    /// acc += Σ `p[j] · rows[j]`, j ascending, one fused multiply-add per element. `rows`: `[p.len()][acc.len()]`.
    pub fn axpy_rows(p: &[f32], rows: &[f32], acc: &mut [f32]) = axpy_rows_body;
}

#[inline(always)]
fn dot_rows_body(rows: &[f32], z: &[f32], x: &mut [f32]) {
    let (z_lanes, z_rest) = z.as_chunks::<LANES>();
    for (x, row) in x.iter_mut().zip(rows.chunks_exact(z.len())) {
        let mut sums = [0.0; LANES];
        let (row_lanes, row_rest) = row.as_chunks::<LANES>();
        for (b, z) in row_lanes.iter().zip(z_lanes) {
            for i in 0..LANES {
                sums[i] = b[i].mul_add(z[i], sums[i]);
            }
        }
        for ((s, b), z) in sums.iter_mut().zip(row_rest).zip(z_rest) {
            *s = b.mul_add(*z, *s);
        }
        *x = sum_lanes(&sums);
    }
}

multiversion! {
    /// `x[d]` = Σ `rows[d][r] · z[r]`: 16 partial sums over r modulo 16, added in one tree. `rows`: `[x.len()][z.len()]`.
    pub fn dot_rows(rows: &[f32], z: &[f32], x: &mut [f32]) = dot_rows_body;
}

#[inline(always)]
fn dot_codes_body(codes: &[i8], z: &[f32]) -> f32 {
    let mut sums = [0.0f32; LANES];
    let (code_lanes, code_rest) = codes.as_chunks::<LANES>();
    let (z_lanes, z_rest) = z.as_chunks::<LANES>();
    for (c, z) in code_lanes.iter().zip(z_lanes) {
        for i in 0..LANES {
            sums[i] = f32::from(c[i]).mul_add(z[i], sums[i]);
        }
    }
    for ((s, c), z) in sums.iter_mut().zip(code_rest).zip(z_rest) {
        *s = f32::from(*c).mul_add(*z, *s);
    }
    sum_lanes(&sums)
}

multiversion! {
    /// Σ `codes[r] · z[r]` in the order of [`dot_rows`].
    pub fn dot_codes(codes: &[i8], z: &[f32]) -> f32 = dot_codes_body;
}

#[inline(always)]
fn add_body(x: &mut [f32], y: &[f32]) {
    for (x, &y) in x.iter_mut().zip(y) {
        *x += y;
    }
}

multiversion! {
    /// x += y.
    pub fn add(x: &mut [f32], y: &[f32]) = add_body;
}

#[inline(always)]
fn rms_norm_body(x: &mut [f32], weight: &[f32], eps: f32) {
    let mut lanes = [0.0f32; LANES];
    let chunks = x.chunks_exact(LANES);
    for (s, &v) in lanes.iter_mut().zip(chunks.remainder()) {
        *s = v * v;
    }
    for c in chunks {
        for (s, &v) in lanes.iter_mut().zip(c) {
            *s = v.mul_add(v, *s);
        }
    }
    let scale = 1.0 / (sum_lanes(&lanes) / x.len() as f32 + eps).sqrt();
    for (x, &w) in x.iter_mut().zip(weight) {
        *x = *x * scale * w;
    }
}

multiversion! {
    /// x ← x / √(mean(x²) + eps) · weight, for one row.
    pub fn rms_norm(x: &mut [f32], weight: &[f32], eps: f32) = rms_norm_body;
}

/// 1 / (1 + e^−x), by the exponential of −|x| alone, which can't overflow.
#[inline(always)]
fn sigmoid(x: f32) -> f32 {
    let e = exp_nonpositive(-x.abs());
    let numerator = if x >= 0.0 { 1.0 } else { e };
    numerator / (1.0 + e)
}

#[inline(always)]
fn silu_mul_body(gate: &mut [f32], up: &[f32]) {
    for (g, &u) in gate.iter_mut().zip(up) {
        *g = *g * sigmoid(*g) * u;
    }
}

multiversion! {
    /// gate ← gate · sigmoid(gate) · up.
    pub fn silu_mul(gate: &mut [f32], up: &[f32]) = silu_mul_body;
}

// GELU's tanh form: √(2/π) and the cubic's factor (Hendrycks and Gimpel 2016).
const SQRT_2_OVER_PI: f32 = 0.797_884_6;
const CUBIC: f32 = 0.044_715;

#[inline(always)]
fn gelu_tanh_mul_body(gate: &mut [f32], up: &[f32]) {
    for (g, &u) in gate.iter_mut().zip(up) {
        let x = *g;
        // x/2 · (1 + tanh t) = x · sigmoid(2t).
        let t = SQRT_2_OVER_PI * x * (CUBIC * x).mul_add(x, 1.0);
        *g = x * sigmoid(2.0 * t) * u;
    }
}

multiversion! {
    /// gate ← GELU(gate) · up, GELU in its tanh form.
    pub fn gelu_tanh_mul(gate: &mut [f32], up: &[f32]) = gelu_tanh_mul_body;
}

#[inline(always)]
fn exp_pair_body(a: f32, b: f32) -> (f32, f32) {
    (exp_nonpositive(a), exp_nonpositive(b))
}

multiversion! {
    /// e^a and e^b for a, b ≤ 0: [`exp_nonpositive`] where no loop around it is compiled for fused multiply-adds.
    pub fn exp_pair(a: f32, b: f32) -> (f32, f32) = exp_pair_body;
}

#[inline(always)]
fn rescale_add_body(sum: &mut [f32], old: f32, x: &[f32], new: f32) {
    for (s, &x) in sum.iter_mut().zip(x) {
        *s = x.mul_add(new, *s * old);
    }
}

multiversion! {
    /// sum = sum · old + x · new, the second product fused.
    pub fn rescale_add(sum: &mut [f32], old: f32, x: &[f32], new: f32) = rescale_add_body;
}

#[cfg(test)]
mod tests {
    use super::*;

    fn values(n: usize) -> Vec<f32> {
        (0..n)
            .map(|i| ((i * 37 % 101) as f32) * 0.19 - 9.5)
            .collect()
    }

    #[test]
    fn activations_and_norm_match_f64_and_the_bodies() {
        let (x, up) = (
            values(133),
            values(133).into_iter().rev().collect::<Vec<_>>(),
        );
        type Gate = fn(&mut [f32], &[f32]);
        type Exact = fn(f64) -> f64;
        let cases: [(Gate, Gate, Exact); 2] = [
            (silu_mul, silu_mul_body, |x| x / (1.0 + (-x).exp())),
            (gelu_tanh_mul, gelu_tanh_mul_body, |x| {
                let t = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044_715 * x * x * x);
                0.5 * x * (1.0 + t.tanh())
            }),
        ];
        for (fast, body, exact) in cases {
            let (mut a, mut b) = (x.clone(), x.clone());
            fast(&mut a, &up);
            body(&mut b, &up);
            assert_eq!(a, b);
            for ((&got, &x), &u) in a.iter().zip(&x).zip(&up) {
                let want = exact(f64::from(x)) * f64::from(u);
                assert!(
                    (f64::from(got) - want).abs() <= 1e-6 * (1.0 + want.abs()),
                    "{x}: {got} {want}"
                );
            }
        }
        let (mut a, mut b) = (x.clone(), x.clone());
        rms_norm(&mut a, &up, 1e-5);
        rms_norm_body(&mut b, &up, 1e-5);
        assert_eq!(a, b);
        let mean = x.iter().map(|&v| f64::from(v).powi(2)).sum::<f64>() / x.len() as f64;
        for ((&got, &x), &w) in a.iter().zip(&x).zip(&up) {
            let want = f64::from(x) / (mean + 1e-5).sqrt() * f64::from(w);
            assert!((f64::from(got) - want).abs() <= 1e-5, "{x}: {got} {want}");
        }
    }

    #[test]
    fn weighted_rows_are_plain_chains_for_any_number_of_channels() {
        for dim in [1, 20, 64, 100, 256] {
            let (p, rows) = (values(7), values(7 * dim));
            let mut acc = values(dim);
            let want: Vec<f32> = (0..dim)
                .map(|i| (0..7).fold(acc[i], |s, j| p[j].mul_add(rows[j * dim + i], s)))
                .collect();
            axpy_rows(&p, &rows, &mut acc);
            assert_eq!(acc, want, "{dim} channels");
        }
    }

    #[test]
    fn activations_saturate_without_nan() {
        let mut x = [-1e30f32, -200.0, 0.0, 200.0, 1e30];
        let up = [1.0; 5];
        silu_mul(&mut x, &up);
        assert_eq!(x, [0.0, 0.0, 0.0, 200.0, 1e30].map(|v: f32| v));
        let mut x = [-200.0f32, 0.0, 200.0];
        gelu_tanh_mul(&mut x, &up[..3]);
        assert_eq!(x, [0.0, 0.0, 200.0]);
    }

    #[test]
    fn exp_is_within_two_ulp() {
        for i in 0..870_000 {
            let x = -(i as f32) * 1e-4;
            let want = f64::from(x).exp();
            let got = f64::from(exp_nonpositive(x));
            assert!((got - want).abs() <= want * 2.4e-7, "{x}: {got} {want}");
        }
        assert_eq!(exp_nonpositive(f32::NEG_INFINITY), 0.0);
        assert_eq!(exp_nonpositive(0.0), 1.0);
    }

    #[test]
    fn maxima_and_exponentials_are_those_of_one_number_after_the_other() {
        for n in [0, 1, 15, 16, 17, 40, 133] {
            let mut x = values(n);
            let m = x.iter().fold(f32::NEG_INFINITY, |m, &v| m.max(v));
            assert_eq!(max(&x), m, "{n} numbers");
            let mut lanes = [0.0; LANES];
            let want: Vec<f32> = x.iter().map(|v| exp_nonpositive(v - m)).collect();
            for (i, v) in want.iter().enumerate() {
                lanes[i % LANES] += v;
            }
            assert_eq!(exp_sum(&mut x, m).to_bits(), sum_lanes(&lanes).to_bits());
            assert_eq!(x, want, "{n} numbers");
        }
    }

    #[test]
    fn dispatched_code_equals_the_body() {
        let x: Vec<f32> = (0..133)
            .map(|i| ((i * 37 % 101) as f32) * 0.13 - 9.0)
            .collect();
        let m = max(&x);
        assert_eq!(m, max_body(&x));
        let (mut a, mut b) = (x.clone(), x);
        assert_eq!(
            exp_sum(&mut a, m).to_bits(),
            exp_sum_body(&mut b, m).to_bits()
        );
        assert_eq!(a, b);
        let mut rows: Vec<f32> = a.iter().rev().chain(&a).copied().collect();
        let mut one_by_one = rows.clone();
        let (mut m, mut l) = ([0.0; 2], [0.0; 2]);
        exp_rows(&mut rows, (133, 100), &mut m, &mut l);
        for (i, row) in one_by_one.chunks_exact_mut(133).enumerate() {
            assert_eq!(m[i], max(&row[..100]));
            assert_eq!(l[i].to_bits(), exp_sum(&mut row[..100], m[i]).to_bits());
        }
        assert_eq!(rows, one_by_one);
    }

    #[test]
    fn codes_are_summed_like_rows() {
        for n in [0, 5, 16, 133, 576] {
            let codes: Vec<i8> = (0..n).map(|i| (i * 37 % 255) as u8 as i8).collect();
            let as_f32: Vec<f32> = codes.iter().map(|&c| f32::from(c)).collect();
            let z = values(n);
            let sum = dot_codes(&codes, &z);
            assert_eq!(sum.to_bits(), dot_codes_body(&codes, &z).to_bits());
            let mut want = [0.0];
            if n > 0 {
                dot_rows(&as_f32, &z, &mut want);
            }
            assert_eq!(sum, want[0], "{n}");
        }
    }
}
