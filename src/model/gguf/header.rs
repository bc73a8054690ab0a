//! The header of a GGUF file, versions 2 and 3: metadata and the table of tensors.
//!
//! Format: `docs/gguf.md` of the ggml project. Everything is little-endian. Invariants: parsing never panics; every
//! count, length and offset is compared with the bytes that are really there *before* memory is reserved for it; every
//! tensor of a parsed header lies inside the file. A [`Problem`] doesn't name the file: the caller knows it.

use std::collections::BTreeMap;
use std::ops::Range;

use super::dequant::TensorType;

/// A metadata value, widened: the file's integer widths carry no meaning of their own. Texts stay where the file is
/// mapped: a vocabulary is a hundred thousand of them.
#[derive(Debug, Clone, PartialEq)]
pub enum Value<'a> {
    /// Any integer type.
    Int(i128),
    /// f32 or f64.
    Float(f64),
    /// A truth value.
    Bool(bool),
    /// UTF-8 text.
    Text(&'a str),
    /// An array of integers.
    Ints(Vec<i64>),
    /// An array of floats.
    Floats(Vec<f32>),
    /// An array of truth values.
    Bools(Vec<bool>),
    /// An array of texts.
    Texts(Vec<&'a str>),
}

/// One tensor: `dims[0]` is the length of a row, as ggml counts.
#[derive(Debug, Clone, PartialEq)]
pub struct TensorInfo {
    /// 1 to 4 dimensions, fastest first, none zero.
    pub dims: Vec<usize>,
    /// How its elements are stored.
    pub kind: TensorType,
    /// Its bytes within the file.
    pub bytes: Range<usize>,
}

/// A parsed and checked header.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Header<'a> {
    /// Metadata by key.
    pub metadata: BTreeMap<&'a str, Value<'a>>,
    /// Tensors by name.
    pub tensors: BTreeMap<&'a str, TensorInfo>,
}

/// What is wrong with a file.
#[derive(Debug, Clone, PartialEq)]
pub enum Problem {
    /// It contradicts itself or its format.
    Damaged(String),
    /// It is sound, but of a kind that isn't read.
    Unsupported {
        /// The property.
        what: String,
        /// What it is.
        got: String,
        /// What it may be.
        allowed: String,
    },
}

impl From<String> for Problem {
    fn from(text: String) -> Self {
        Self::Damaged(text)
    }
}

impl Problem {
    fn unsupported(
        what: impl Into<String>,
        got: impl Into<String>,
        allowed: impl Into<String>,
    ) -> Self {
        Self::Unsupported {
            what: what.into(),
            got: got.into(),
            allowed: allowed.into(),
        }
    }
}

/// A name or value from a file in a form that fits an error's one line.
pub fn short(name: &str) -> String {
    const MOST: usize = 60;
    let mut line = String::from("`");
    for c in name.chars().take(MOST) {
        if c.is_control() {
            line.extend(c.escape_default());
        } else {
            line.push(c);
        }
    }
    line.push_str(if name.chars().nth(MOST).is_some() {
        "...`"
    } else {
        "`"
    });
    line
}

const MAGIC: &[u8] = b"GGUF";
const DEFAULT_ALIGNMENT: usize = 32;
const MAX_DIMS: u32 = 4;

impl<'a> Header<'a> {
    /// Parses the header of `file`, the bytes of a whole GGUF file.
    ///
    /// # Errors
    /// The first [`Problem`] met.
    pub fn parse(file: &'a [u8]) -> Result<Self, Problem> {
        let mut cursor = Cursor { bytes: file, at: 0 };
        check_version(&mut cursor)?;
        // The least a tensor takes: a name's length, a count of dimensions, one of them, a type, an offset.
        let n_tensors = cursor.count(8 + 4 + 8 + 4 + 8, "tensors")?;
        // The least an entry takes: a key's length, a type, a one-byte value.
        let n_entries = cursor.count(8 + 4 + 1, "metadata entries")?;
        let mut header = Self::default();
        for _ in 0..n_entries {
            let key = cursor.text("a metadata key")?;
            let label = short(key);
            let kind = cursor.u32(&label)?;
            let value = cursor.value(kind, &label)?;
            if header.metadata.insert(key, value).is_some() {
                return Err(format!("metadata key {label} stands twice").into());
            }
        }
        let mut unplaced = Vec::with_capacity(n_tensors);
        for _ in 0..n_tensors {
            unplaced.push(cursor.tensor()?);
        }
        let alignment = header.alignment()?;
        let data_start = cursor
            .at
            .checked_next_multiple_of(alignment)
            .unwrap_or(usize::MAX);
        for (name, dims, kind, offset) in unplaced {
            let label = short(name);
            let bytes = place(&dims, kind, offset, alignment, data_start..file.len())
                .map_err(|problem| format!("tensor {label} {problem}"))?;
            if header
                .tensors
                .insert(name, TensorInfo { dims, kind, bytes })
                .is_some()
            {
                return Err(format!("tensor {label} stands twice").into());
            }
        }
        Ok(header)
    }

    fn alignment(&self) -> Result<usize, String> {
        match self.metadata.get("general.alignment") {
            None => Ok(DEFAULT_ALIGNMENT),
            Some(&Value::Int(n)) if n > 0 && n <= 1 << 20 && (n as u32).is_power_of_two() => {
                Ok(n as usize)
            }
            Some(other) => Err(format!(
                "general.alignment is {other:?}, expected a power of two"
            )),
        }
    }
}

fn check_version(cursor: &mut Cursor) -> Result<(), Problem> {
    if cursor.take(4, "magic")? != MAGIC {
        return Err("it doesn't begin with the letters GGUF".to_owned().into());
    }
    match cursor.u32("version")? {
        2 | 3 => Ok(()),
        v if v != 0 && v.swap_bytes() <= 3 => Err(Problem::unsupported(
            "its byte order",
            "big-endian",
            "little-endian",
        )),
        v => Err(Problem::unsupported(
            "its GGUF version",
            v.to_string(),
            "2, 3",
        )),
    }
}

/// Where a tensor's bytes lie within the file, if they do.
fn place(
    dims: &[usize],
    kind: TensorType,
    offset: u64,
    alignment: usize,
    data: Range<usize>,
) -> Result<Range<usize>, String> {
    let n_elements = dims
        .iter()
        .try_fold(1usize, |n, &d| n.checked_mul(d))
        .ok_or("is too large to exist")?;
    if dims.contains(&0) || !dims[0].is_multiple_of(kind.block_len()) {
        return Err(format!(
            "has dimensions {dims:?}, which {kind:?} blocks of {} can't fill",
            kind.block_len()
        ));
    }
    let n_bytes = (n_elements / kind.block_len())
        .checked_mul(kind.block_bytes())
        .ok_or("is too large to exist")?;
    let start = usize::try_from(offset)
        .ok()
        .and_then(|o| o.checked_add(data.start));
    let end = start.and_then(|s| s.checked_add(n_bytes));
    match (start, end) {
        (Some(_), Some(_)) if !offset.is_multiple_of(alignment as u64) => Err(format!(
            "starts at {offset}, which isn't a multiple of {alignment}"
        )),
        (Some(start), Some(end)) if end <= data.end => Ok(start..end),
        _ => Err(format!(
            "needs {n_bytes} bytes at {offset}, but the file ends at {} bytes",
            data.end
        )),
    }
}

/// A position in the header.
struct Cursor<'a> {
    bytes: &'a [u8],
    at: usize,
}

type Unplaced<'a> = (&'a str, Vec<usize>, TensorType, u64);

impl<'a> Cursor<'a> {
    fn take(&mut self, n: usize, what: &str) -> Result<&'a [u8], String> {
        let end = self
            .at
            .checked_add(n)
            .filter(|&end| end <= self.bytes.len());
        let end = end.ok_or_else(|| {
            let left = self.bytes.len() - self.at;
            format!(
                "{what} needs {n} bytes at byte {}, {left} are left",
                self.at
            )
        })?;
        let taken = &self.bytes[self.at..end];
        self.at = end;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self, what: &str) -> Result<[u8; N], String> {
        let mut array = [0; N];
        array.copy_from_slice(self.take(N, what)?);
        Ok(array)
    }

    fn u32(&mut self, what: &str) -> Result<u32, String> {
        Ok(u32::from_le_bytes(self.array(what)?))
    }

    fn u64(&mut self, what: &str) -> Result<u64, String> {
        Ok(u64::from_le_bytes(self.array(what)?))
    }

    /// A count of things of at least `min_bytes` each, of which there can't be more than the rest of the file holds.
    fn count(&mut self, min_bytes: usize, what: &str) -> Result<usize, String> {
        let n = self.u64(what)?;
        let most = (self.bytes.len() - self.at) / min_bytes;
        if n > most as u64 {
            return Err(format!(
                "it claims {n} {what}, but the rest of the file holds {most} at most"
            ));
        }
        Ok(n as usize)
    }

    fn text(&mut self, what: &str) -> Result<&'a str, String> {
        let n = self.count(1, what)?;
        let bytes = self.take(n, what)?;
        std::str::from_utf8(bytes).map_err(|e| format!("{what} isn't UTF-8: {e}"))
    }

    fn bool(&mut self, key: &str) -> Result<bool, String> {
        match self.take(1, key)?[0] {
            0 => Ok(false),
            1 => Ok(true),
            other => Err(format!("{key} holds {other} where a truth value is 0 or 1")),
        }
    }

    fn float(&mut self, kind: u32, key: &str) -> Result<f64, String> {
        match kind {
            kind::F32 => Ok(f32::from_le_bytes(self.array(key)?).into()),
            _ => Ok(f64::from_le_bytes(self.array(key)?)),
        }
    }

    fn int(&mut self, kind: u32, key: &str) -> Result<i128, String> {
        Ok(match kind {
            kind::U8 => u8::from_le_bytes(self.array(key)?).into(),
            kind::I8 => i8::from_le_bytes(self.array(key)?).into(),
            kind::U16 => u16::from_le_bytes(self.array(key)?).into(),
            kind::I16 => i16::from_le_bytes(self.array(key)?).into(),
            kind::U32 => u32::from_le_bytes(self.array(key)?).into(),
            kind::I32 => i32::from_le_bytes(self.array(key)?).into(),
            kind::U64 => u64::from_le_bytes(self.array(key)?).into(),
            kind::I64 => i64::from_le_bytes(self.array(key)?).into(),
            other => return Err(format!("{key} has type {other}, expected 0 to 12")),
        })
    }

    fn value(&mut self, kind: u32, key: &str) -> Result<Value<'a>, String> {
        Ok(match kind {
            kind::F32 | kind::F64 => Value::Float(self.float(kind, key)?),
            kind::BOOL => Value::Bool(self.bool(key)?),
            kind::TEXT => Value::Text(self.text(key)?),
            kind::ARRAY => self.array_value(key)?,
            _ => Value::Int(self.int(kind, key)?),
        })
    }

    fn array_value(&mut self, key: &str) -> Result<Value<'a>, String> {
        let kind = self.u32(key)?;
        let n = self.count(kind::min_bytes(kind), &format!("elements in {key}"))?;
        Ok(match kind {
            kind::F32 | kind::F64 => Value::Floats(
                (0..n)
                    .map(|_| self.float(kind, key).map(|x| x as f32))
                    .collect::<Result<_, _>>()?,
            ),
            kind::BOOL => Value::Bools((0..n).map(|_| self.bool(key)).collect::<Result<_, _>>()?),
            kind::TEXT => Value::Texts((0..n).map(|_| self.text(key)).collect::<Result<_, _>>()?),
            kind::ARRAY => return Err(format!("{key} is an array of arrays")),
            _ => {
                let narrow =
                    |x: i128| i64::try_from(x).map_err(|_| format!("{key} holds {x}, too large"));
                Value::Ints(
                    (0..n)
                        .map(|_| self.int(kind, key).and_then(narrow))
                        .collect::<Result<_, _>>()?,
                )
            }
        })
    }

    fn tensor(&mut self) -> Result<Unplaced<'a>, Problem> {
        let name = self.text("a tensor's name")?;
        let label = short(name);
        let n_dims = self.u32(&label)?;
        if n_dims == 0 || n_dims > MAX_DIMS {
            return Err(format!(
                "tensor {label} has {n_dims} dimensions, expected 1 to {MAX_DIMS}"
            )
            .into());
        }
        let dims = (0..n_dims)
            .map(|_| {
                usize::try_from(self.u64(&label)?)
                    .map_err(|_| format!("tensor {label} is too large"))
            })
            .collect::<Result<Vec<_>, String>>()?;
        let id = self.u32(&label)?;
        let kind = TensorType::from_id(id).ok_or_else(|| {
            let got = TensorType::name_of_id(id);
            Problem::unsupported(
                format!("the type of tensor {label}"),
                got,
                TensorType::known(),
            )
        })?;
        let offset = self.u64(&label)?;
        Ok((name, dims, kind, offset))
    }
}

/// The numbers of metadata types.
mod kind {
    pub const U8: u32 = 0;
    pub const I8: u32 = 1;
    pub const U16: u32 = 2;
    pub const I16: u32 = 3;
    pub const U32: u32 = 4;
    pub const I32: u32 = 5;
    pub const F32: u32 = 6;
    pub const BOOL: u32 = 7;
    pub const TEXT: u32 = 8;
    pub const ARRAY: u32 = 9;
    pub const U64: u32 = 10;
    pub const I64: u32 = 11;
    pub const F64: u32 = 12;

    /// The fewest bytes one value of this type takes.
    pub fn min_bytes(kind: u32) -> usize {
        match kind {
            U16 | I16 => 2,
            U32 | I32 | F32 => 4,
            U64 | I64 | F64 | TEXT => 8,
            ARRAY => 12,
            _ => 1,
        }
    }
}
