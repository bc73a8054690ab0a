//! Numbers as text: as many digits as the error allows.
//!
//! Invariants: brackets hold a 95 % interval, ± stands before one standard error; a missing error is never printed as 0, and nothing is ever printed as NaN.

use crate::eval::stats::Estimate;

/// Digits after the point at most; smaller numbers are written with an exponent.
const MAX_DECIMALS: usize = 4;

/// Values below this take an exponent where digits run out, others up to [`MAX_FIXED`] digits after the point.
const SMALL: f64 = 0.01;

/// Digits after the point of a value near 1 that is known well.
const MAX_FIXED: usize = 6;

/// An error beyond this says no more than that nothing is known.
const MAX_ERROR: f64 = 1e6;

/// `value ± error`, both to the second digit of the error; the value alone, to three digits, where there is none.
pub fn plus_minus(value: f64, half: Option<f64>) -> String {
    match half {
        Some(half) if half > MAX_ERROR => format!("{} ± >1e6", significant(value, 3)),
        Some(half) if half > 0.0 => {
            let decimals = decimals(half, 2);
            if decimals > MAX_DECIMALS && value.abs() < SMALL {
                return format!("{value:.1e} ± {half:.0e}");
            }
            let decimals = decimals.min(MAX_FIXED);
            format!("{value:.decimals$} ± {half:.decimals$}")
        }
        Some(_) => format!("{} ± 0", significant(value, 3)),
        None => significant(value, 3),
    }
}

/// [`plus_minus`] with the value's sign always shown.
pub fn signed_plus_minus(value: f64, half: Option<f64>) -> String {
    let text = plus_minus(value, half);
    if value > 0.0 {
        format!("+{text}")
    } else {
        text
    }
}

/// `value [low, high]` of a 95 % interval, all to the second digit of half its width; the value alone, to three digits, where
/// there is none.
pub fn estimate(estimate: &Estimate) -> String {
    let value = estimate.value;
    let Some((low, high)) = estimate.interval else {
        return significant(value, 3);
    };
    let half = (high - low) / 2.0;
    if half == 0.0 {
        let text = significant(value, 3);
        return format!("{text} [{text}, {text}]");
    }
    let decimals = if half.is_finite() {
        decimals(half, 2)
    } else {
        0
    };
    let is_small = decimals > MAX_DECIMALS && value.abs() < SMALL;
    let fixed = decimals.min(MAX_FIXED);
    let text = |x: f64| match x {
        x if x > MAX_ERROR => ">1e6".to_owned(),
        x if x < -MAX_ERROR => "<-1e6".to_owned(),
        x if is_small && x != 0.0 => format!("{x:.1e}"),
        _ if is_small => "0".to_owned(),
        x => unsigned_zero(format!("{x:.fixed$}")),
    };
    format!("{} [{}, {}]", text(value), text(low), text(high))
}

/// What is rounded to 0 has no sign.
fn unsigned_zero(text: String) -> String {
    match text.strip_prefix('-') {
        Some(rest) if rest.chars().all(|c| c == '0' || c == '.') => rest.to_owned(),
        _ => text,
    }
}

/// [`estimate`] with the value's sign always shown.
pub fn signed_estimate(of: &Estimate) -> String {
    let text = estimate(of);
    if of.value > 0.0 {
        format!("+{text}")
    } else {
        text
    }
}

/// The value to `digits` significant digits.
pub fn significant(value: f64, digits: i32) -> String {
    if value == 0.0 {
        return "0".to_owned();
    }
    if !value.is_finite() {
        return String::new();
    }
    let decimals = decimals(value, digits);
    if decimals > MAX_DECIMALS + 1 {
        return format!("{value:.1e}");
    }
    format!("{value:.decimals$}")
}

/// A mean of counts: whole where it is whole, else to one decimal.
pub fn mean_count(value: f64) -> String {
    if value.fract() == 0.0 {
        grouped(value as u64)
    } else {
        format!("{value:.1}")
    }
}

/// An integer in groups of three.
pub fn grouped(value: u64) -> String {
    let digits = value.to_string();
    let mut out = String::new();
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            out.push(',');
        }
        out.push(digit);
    }
    out
}

/// "1 token", "2 tokens".
pub fn count(n: usize, noun: &str) -> String {
    let plural = if n == 1 { "" } else { "s" };
    format!("{} {noun}{plural}", grouped(n as u64))
}

/// Digits after the point that show `digits` significant ones.
fn decimals(value: f64, digits: i32) -> usize {
    // What a sum's last bit keeps from a power of ten counts as one.
    let exponent = (value.abs().log10() + 1e-12).floor() as i32;
    usize::try_from(digits - 1 - exponent).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::eval::stats::Over;

    #[test]
    fn the_error_sets_the_digits() {
        assert_eq!(plus_minus(10.6123, Some(2.4)), "10.6 ± 2.4");
        assert_eq!(plus_minus(0.01394, Some(0.00123)), "0.0139 ± 0.0012");
        assert_eq!(plus_minus(1234.5, Some(312.0)), "1234 ± 312");
        assert_eq!(plus_minus(1.234e-6, Some(3.1e-7)), "1.2e-6 ± 3e-7");
        assert_eq!(plus_minus(1.000_019, Some(1.2e-5)), "1.000019 ± 0.000012");
        assert_eq!(plus_minus(0.0, Some(0.0)), "0 ± 0");
        assert_eq!(plus_minus(12.3, Some(f64::INFINITY)), "12.3 ± >1e6");
        assert_eq!(plus_minus(0.013941, None), "0.0139");
        assert_eq!(signed_plus_minus(0.5, Some(0.25)), "+0.50 ± 0.25");
        assert_eq!(signed_plus_minus(-0.5, None), "-0.500");
    }

    #[test]
    fn brackets_hold_the_interval() {
        let of = |value: f64, low: f64, high: f64| Estimate {
            value,
            n: 9,
            se: None,
            interval: Some((low, high)),
            over: Over::Items,
        };
        assert_eq!(estimate(&of(10.6123, 8.4, 13.7)), "10.6 [8.4, 13.7]");
        assert_eq!(
            estimate(&of(0.01394, 0.0129, 0.0164)),
            "0.0139 [0.0129, 0.0164]"
        );
        assert_eq!(estimate(&of(1.2e-6, 0.0, 3.4e-6)), "1.2e-6 [0, 3.4e-6]");
        assert_eq!(
            estimate(&of(0.1 + 1e-6, 0.1, 0.1 + 2e-6)),
            "0.100001 [0.100000, 0.100002]"
        );
        assert_eq!(estimate(&of(0.0, 0.0, 0.0)), "0 [0, 0]");
        assert_eq!(estimate(&of(12.3, -99.0, f64::INFINITY)), "12 [-99, >1e6]");
        assert_eq!(signed_estimate(&of(0.5, 0.25, 0.75)), "+0.50 [0.25, 0.75]");
        assert_eq!(
            signed_estimate(&of(-0.001, -0.25, 0.004)),
            "0.00 [-0.25, 0.00]"
        );
        let none = Estimate {
            interval: None,
            ..of(-0.5, 0.0, 0.0)
        };
        assert_eq!(signed_estimate(&none), "-0.500");
    }

    #[test]
    fn significant_digits() {
        assert_eq!(significant(6480.0, 3), "6480");
        assert_eq!(significant(4.5, 3), "4.50");
        assert_eq!(significant(0.00001234, 3), "1.2e-5");
        assert_eq!(significant(0.0, 3), "0");
        assert_eq!(significant(1.0 - f64::EPSILON, 2), "1.0");
        assert_eq!(significant(f64::NAN, 3), "");
    }

    #[test]
    fn integers() {
        assert_eq!(grouped(0), "0");
        assert_eq!(grouped(23_040), "23,040");
        assert_eq!(grouped(1_234_567), "1,234,567");
        assert_eq!(mean_count(1280.0), "1,280");
        assert_eq!(mean_count(1280.25), "1280.2");
        assert_eq!(count(1, "token"), "1 token");
        assert_eq!(count(2048, "token"), "2,048 tokens");
    }
}
