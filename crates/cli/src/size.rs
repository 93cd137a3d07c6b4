//! Sizes as people write them: `4096`, `512K`, `1.5G`.

use std::fmt;
use std::str::FromStr;

const UNITS: [(&str, u64); 4] = [
    ("T", 1 << 40),
    ("G", 1 << 30),
    ("M", 1 << 20),
    ("K", 1 << 10),
];

/// A number of bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Size(u64);

impl Size {
    pub fn new(bytes: u64) -> Size {
        Size(bytes)
    }

    pub fn bytes(self) -> u64 {
        self.0
    }
}

impl FromStr for Size {
    type Err = String;

    fn from_str(text: &str) -> Result<Size, String> {
        let why = || {
            format!("'{text}' is not a size: write a number of bytes or like 512K, 64M, 1.5G, 2T")
        };
        let upper = text.trim().to_ascii_uppercase();
        let plain = upper
            .strip_suffix("IB")
            .or(upper.strip_suffix('B'))
            .unwrap_or(&upper);
        let (number, unit) = UNITS
            .iter()
            .find_map(|(suffix, unit)| plain.strip_suffix(suffix).map(|n| (n, *unit)))
            .unwrap_or((plain, 1));
        let (whole, fraction) = number.split_once('.').unwrap_or((number, "0"));
        let digits = |s: &str| !s.is_empty() && s.bytes().all(|b| b.is_ascii_digit());
        if !digits(whole) || !digits(fraction) || fraction.len() > 9 {
            return Err(why());
        }
        let whole: u64 = whole.parse().map_err(|_| why())?;
        let parts: u64 = fraction.parse().map_err(|_| why())?;
        let scale = 10u64.pow(fraction.len() as u32);
        let part = (u128::from(parts) * u128::from(unit) / u128::from(scale)) as u64;
        whole
            .checked_mul(unit)
            .and_then(|bytes| bytes.checked_add(part))
            .map(Size)
            .ok_or_else(|| format!("'{text}' is more than 16 EiB"))
    }
}

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (suffix, unit) in UNITS {
            if self.0 >= unit {
                return write!(f, "{:.1} {suffix}iB", self.0 as f64 / unit as f64);
            }
        }
        write!(f, "{} B", self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_read_as_written() {
        let cases: [(&str, Option<u64>); 14] = [
            ("0", Some(0)),
            ("4096", Some(4096)),
            ("512K", Some(512 << 10)),
            ("64m", Some(64 << 20)),
            ("1.5G", Some(3 << 29)),
            ("2TiB", Some(2 << 40)),
            ("10GB", Some(10 << 30)),
            ("", None),
            ("K", None),
            ("1.G", None),
            ("-1", None),
            ("4X", None),
            ("99999999T", None),
            ("18446744073709551616", None),
        ];
        for (text, bytes) in cases {
            assert_eq!(text.parse::<Size>().ok().map(Size::bytes), bytes, "{text}");
        }
    }

    #[test]
    fn sizes_show_one_decimal() {
        assert_eq!(Size(1023).to_string(), "1023 B");
        assert_eq!(Size(3 << 29).to_string(), "1.5 GiB");
    }
}
