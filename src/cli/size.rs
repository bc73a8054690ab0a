//! Sizes in bytes as people write them: `24GiB`, `24GB`, `500MB`.
//!
//! Invariant: KiB, MiB, GiB and TiB are powers of 1024, KB, MB, GB and TB powers of 1000; a number alone is bytes.

use std::fmt;
use std::str::FromStr;

/// A number of bytes, at least 1.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ByteSize(pub u64);

const UNITS: [(&str, u64); 10] = [
    ("", 1),
    ("B", 1),
    ("KIB", 1 << 10),
    ("MIB", 1 << 20),
    ("GIB", 1 << 30),
    ("TIB", 1 << 40),
    ("KB", 1_000),
    ("MB", 1_000_000),
    ("GB", 1_000_000_000),
    ("TB", 1_000_000_000_000),
];

/// Beyond any machine, and far from what sums could overflow.
const MOST: f64 = (1u64 << 50) as f64;

impl FromStr for ByteSize {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || {
            format!(
                "`{text}` is no size: write a number and B, KB, MB, GB, TB (powers of 1000) or KiB, MiB, GiB, TiB (powers of 1024), as in 24GiB"
            )
        };
        let text = text.trim();
        let end = text.find(|c: char| !(c.is_ascii_digit() || c == '.'));
        let (number, unit) = text.split_at(end.unwrap_or(text.len()));
        let unit = unit.trim().to_ascii_uppercase();
        let (_, factor) = UNITS
            .iter()
            .find(|(name, _)| *name == unit)
            .ok_or_else(wrong)?;
        let number: f64 = number.parse().map_err(|_| wrong())?;
        let bytes = number * *factor as f64;
        if !(1.0..=MOST).contains(&bytes) {
            return Err(format!("`{text}` is no size: it must be 1 B to 1024 TiB"));
        }
        Ok(Self(bytes.round() as u64))
    }
}

impl fmt::Display for ByteSize {
    /// In the largest unit of 1024s that leaves at least 1, to four digits.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let bytes = self.0 as f64;
        let (name, factor) = [
            ("TiB", 1u64 << 40),
            ("GiB", 1 << 30),
            ("MiB", 1 << 20),
            ("KiB", 1 << 10),
        ]
        .into_iter()
        .find(|(_, factor)| self.0 >= *factor)
        .unwrap_or(("B", 1));
        let value = bytes / factor as f64;
        match value {
            _ if factor == 1 => write!(f, "{} B", self.0),
            v if v < 10.0 => write!(f, "{v:.3} {name}"),
            v if v < 100.0 => write!(f, "{v:.2} {name}"),
            v => write!(f, "{v:.1} {name}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_and_shown() {
        let size = |text: &str| text.parse::<ByteSize>().map(|s| s.0);
        assert_eq!(size("24GiB"), Ok(24 << 30));
        assert_eq!(size("24 gb"), Ok(24_000_000_000));
        assert_eq!(size("500MB"), Ok(500_000_000));
        assert_eq!(size("1.5KiB"), Ok(1536));
        assert_eq!(size("12345"), Ok(12_345));
        assert_eq!(size("1B"), Ok(1));
        for wrong in ["", "GiB", "24G", "-1GB", "1..2GB", "24 GiB x", "1e3"] {
            let message = size(wrong).unwrap_err();
            assert!(message.contains("is no size: write"), "{wrong}: {message}");
        }
        assert!(size("0").unwrap_err().contains("1 B to 1024 TiB"));
        assert!(size("9999999TiB").is_err());
        assert_eq!(ByteSize(16 << 30).to_string(), "16.00 GiB");
        assert_eq!(ByteSize(999).to_string(), "999 B");
        assert_eq!(ByteSize(1536).to_string(), "1.500 KiB");
        assert_eq!(ByteSize(1000 << 30).to_string(), "1000.0 GiB");
    }
}
