//! `int1 int2 int3 int4 int8`: integer codes on a grid per group, the group along a row (`axis = "token"`) or along the rows
//! of one channel (`axis = "channel"`), as KIVI and its kin have it.
//!
//! A group stores a step and, asymmetric, a zero; a channel is `zero + code · step`.
//!
//! ```text
//! asymmetric   zero = min                    step = (max − zero) / (2^b − 1)          codes 0 to 2^b − 1
//! symmetric    zero = −2^(b−1) · step        step = max|x| / (2^(b−1) − 1)            codes 1 to 2^b − 1
//! ```
//!
//! At 1 bit the grid runs between the middles of the group's halves, (3·min + max) / 4 and (min + 3·max) / 4, and there
//! is none symmetric.
//!
//! Symmetric codes are the signed ones plus 2^(b−1), so 0 has one level and the lowest code is never written; int2 then
//! has the three levels −step, 0 and step.
//!
//! Bits per channel, with f16 (16 bits for the step, 16 for the zero, over a whole group): int4 by channel in groups of
//! 128 takes 4 + 32/128 = 4.25, int4 by token in groups of 64 takes 4 + 32/64 = 4.5, KIVI's groups of 32 take b + 1;
//! symmetric saves the zero, E4M3 halves both.
//!
//! Invariants: the code is that of the *stored* step and zero, `clamp(round((x − zero) / step))` in f32, halves to the
//! even code, all codes at their lowest where the step is 0. Steps are rounded up and zeros down, so every channel lies
//! inside its grid (clamped magnitudes and 1 bit aside) and is off by half a stored step at most; with `fit = "mse"` (`fit.rs`)
//! what lies outside the grid gets an end's code. Decoding is one fused multiply-add. A last group that is short (64 + 16 of
//! 80 channels, 32 + 1 of 33) is a group of its own over the channels or rows that there are; nothing is padded but the
//! last byte of a row's codes.

mod channel;
mod fit;
mod leveled;
mod scale;
mod tile;
mod token;

use std::sync::Arc;

use self::channel::Channel;
use self::fit::Fit;
use self::scale::ScaleFormat;
use self::token::Token;
use super::super::RANGE;
use super::super::stage::{
    BuildContext, Codec, Domain, Kind, ParamDef, Params, Stage, StageDef, StageError, Tolerance,
    never,
};
use super::bits;
use super::with_kernel::WithKernel;

const PARAMS: &[ParamDef] = &[
    ParamDef {
        name: "axis",
        domain: Domain::Choice {
            of: &["token", "channel"],
        },
        default: Some("token"),
        doc: "whether a group runs along a row or along the rows of one channel",
    },
    ParamDef {
        name: "group",
        domain: Domain::Int { min: 8, max: 1024 },
        default: None,
        doc: "channels of a group (a multiple of 8; 64 if not given), or its rows (all of a page if not given)",
    },
    ParamDef {
        name: "page",
        domain: Domain::Int { min: 8, max: 128 },
        default: None,
        doc: "by channel: rows coded together, a divisor of 128 and a multiple of `group`; one group, or 128, if not given",
    },
    ParamDef {
        name: "zero",
        domain: Domain::Choice {
            of: &["asymmetric", "symmetric"],
        },
        default: Some("asymmetric"),
        doc: "a grid from the group's minimum to its maximum, or one that is symmetric around 0",
    },
    ParamDef {
        name: "scales",
        domain: Domain::Choice {
            of: &["f16", "bf16", "fp8"],
        },
        default: Some("f16"),
        doc: "format of steps and zeros; fp8 is E4M3 of the span",
    },
    ParamDef {
        name: "fit",
        domain: Domain::Choice {
            of: &["minmax", "mse"],
        },
        default: Some("minmax"),
        doc: "the grid spans the group, or is the one of least squared error (slower to encode, the same to read)",
    },
];

const PAPER: &str = "KIVI, arXiv 2402.02750: asymmetric groups, K by channel, V by token";

/// `int1`'s registry entry.
pub const INT1: StageDef = StageDef {
    name: "int1",
    doc: "1-bit integers: two levels in the middles of a group's halves; 1.5 bits in groups of 64",
    paper: "SpeCache, arXiv 2503.16163: levels at the middles, which KIVI's grid at 1 bit has not",
    examples: &[
        "\"int1\"",
        "{ method = \"int1\", axis = \"channel\", group = 32 }",
    ],
    tolerance: Tolerance::RelativeL2(0.95),
    build: |p, c| build("int1", 1, p, c),
    ..INT2
};

/// `int2`'s registry entry.
pub const INT2: StageDef = StageDef {
    name: "int2",
    kind: Kind::Encode,
    doc: "2-bit integers on a grid per group, by token or by channel; 2.5 bits in groups of 64",
    paper: PAPER,
    params: PARAMS,
    calibrated: never,
    examples: &[
        "\"int2\"",
        "{ method = \"int2\", axis = \"channel\", group = 32 }",
        "{ method = \"int2\", fit = \"mse\" }",
        "{ method = \"int2\", group = 32, zero = \"symmetric\", scales = \"bf16\" }",
    ],
    tolerance: Tolerance::RelativeL2(0.95),
    build: |p, c| build("int2", 2, p, c),
};

/// `int3`'s registry entry.
pub const INT3: StageDef = StageDef {
    name: "int3",
    doc: "3-bit integers on a grid per group, by token or by channel; 3.5 bits in groups of 64",
    examples: &[
        "\"int3\"",
        "{ method = \"int3\", axis = \"channel\", zero = \"symmetric\" }",
        "{ method = \"int3\", group = 16, scales = \"fp8\" }",
        "{ method = \"int3\", axis = \"channel\", fit = \"mse\" }",
    ],
    tolerance: Tolerance::RelativeL2(0.35),
    build: |p, c| build("int3", 3, p, c),
    ..INT2
};

/// `int4`'s registry entry.
pub const INT4: StageDef = StageDef {
    name: "int4",
    doc: "4-bit integers on a grid per group, by token or by channel; 4.5 bits in groups of 64",
    examples: &[
        "\"int4\"",
        "{ method = \"int4\", axis = \"channel\", group = 32, page = 128 }",
        "{ method = \"int4\", group = 32, zero = \"symmetric\", scales = \"fp8\" }",
    ],
    tolerance: Tolerance::RelativeL2(0.17),
    build: |p, c| build("int4", 4, p, c),
    ..INT2
};

/// `int8`'s registry entry.
pub const INT8: StageDef = StageDef {
    name: "int8",
    doc: "8-bit integers on a grid per group, by token or by channel; 8.5 bits in groups of 64",
    examples: &["\"int8\"", "{ method = \"int8\", zero = \"symmetric\" }"],
    tolerance: Tolerance::RelativeL2(0.012),
    build: |p, c| build("int8", 8, p, c),
    ..INT2
};

/// Codes of a group and how its step and zero are stored.
#[derive(Debug, Clone, Copy)]
struct Grid {
    bits: usize,
    /// Whether the zero is stored rather than given by the step.
    has_zero: bool,
    scales: ScaleFormat,
    fit: Fit,
}

impl Grid {
    /// Steps that the span is divided into.
    fn divisor(self) -> f32 {
        let n_codes = 1u32 << self.bits;
        (if self.has_zero { n_codes } else { n_codes / 2 } - 1) as f32
    }

    /// The lowest code in use, as a number.
    #[inline(always)]
    fn low(self) -> f32 {
        if self.has_zero { 0.0 } else { 1.0 }
    }

    /// The highest code, as a number.
    #[inline(always)]
    fn high(self) -> f32 {
        ((1u32 << self.bits) - 1) as f32
    }

    /// The symmetric grid's zero, in steps.
    #[inline(always)]
    fn symmetric_zero(self) -> f32 {
        -((1u32 << (self.bits - 1)) as f32)
    }

    /// Bytes of the steps and zeros of `n` groups: all steps, then all zeros.
    fn scale_bytes(self, n: usize) -> usize {
        n * self.scales.bytes() * (1 + usize::from(self.has_zero))
    }

    /// Stores what a group from `min` to `max` needs; `zero` is empty if it isn't stored.
    fn put(self, (min, max): (f32, f32), step: &mut [u8], zero: &mut [u8]) {
        let span = if self.has_zero {
            let mut stored = [0.0];
            self.scales.put_zero(min, zero);
            self.scales.zeros(zero, &mut stored);
            max - stored[0]
        } else {
            max.max(-min)
        };
        self.scales.put_step(span, self.divisor(), step);
    }

    /// Reads the steps and zeros of groups `first..first + steps.len()` of those in `bytes`.
    #[inline(always)]
    fn read(self, bytes: &[u8], first: usize, steps: &mut [f32], zeros: &mut [f32]) {
        let n = self.scales.bytes();
        self.scales
            .steps(&bytes[first * n..], self.divisor(), steps);
        if self.has_zero {
            self.scales
                .zeros(&bytes[bytes.len() / 2 + first * n..], zeros);
        } else {
            for (z, s) in zeros.iter_mut().zip(steps) {
                *z = self.symmetric_zero() * *s;
            }
        }
    }
}

fn build(
    name: &str,
    bits: usize,
    params: &Params,
    _context: &BuildContext<'_>,
) -> Result<Stage, StageError> {
    let refused = |problem: String| StageError::Parameter {
        kind: Kind::Encode,
        name: name.to_owned(),
        problem,
    };
    let size = |key: &str| params.int(key).and_then(|v| usize::try_from(v).ok());
    let grid = Grid {
        bits,
        has_zero: params.text("zero") != Some("symmetric"),
        scales: match params.text("scales") {
            Some("bf16") => ScaleFormat::Bf16,
            Some("fp8") => ScaleFormat::Fp8,
            _ => ScaleFormat::F16,
        },
        fit: match params.text("fit") {
            Some("mse") => Fit::Mse,
            _ => Fit::MinMax,
        },
    };
    if grid.bits == 1 && !grid.has_zero {
        return Err(refused(
            "`zero` is \"symmetric\", and one bit has two levels, neither of them 0: write zero = \"asymmetric\"".to_owned(),
        ));
    }
    let codec = if params.text("axis") == Some("channel") {
        let group = size("group").or(size("page")).unwrap_or(RANGE);
        let page = size("page").unwrap_or(group);
        if group == 0 || !page.is_multiple_of(group) || !RANGE.is_multiple_of(page) {
            return Err(refused(format!(
                "`page` is {page} and `group` is {group}; by channel `page` must divide {RANGE} and be a multiple of `group`: give 8, 16, 32, 64 or 128"
            )));
        }
        Codec::Pages(Arc::new(Channel { grid, group, page }))
    } else {
        let group = size("group").unwrap_or(64);
        if group == 0 || !group.is_multiple_of(bits::RUN) {
            return Err(refused(format!(
                "`group` is {group}, must be a multiple of {}",
                bits::RUN
            )));
        }
        if let Some(page) = size("page") {
            return Err(refused(format!(
                "`page` is {page}, but rows are coded one by one with axis = \"token\": leave it out or take axis = \"channel\""
            )));
        }
        let codec = Token { grid, group };
        let kernel = codec.kernel();
        Codec::Rows(Arc::new(WithKernel { codec, kernel }))
    };
    Ok(Stage::Encode(codec))
}

#[cfg(test)]
mod tests;
