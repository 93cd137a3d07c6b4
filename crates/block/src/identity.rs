//! UUID and label: they tell a volume from others.

use std::fmt;
use std::io;
use std::str::FromStr;

use rustix::rand::{GetRandomFlags, getrandom};
use thiserror::Error;

/// A UUID, as RFC 9562 writes it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Uuid(pub [u8; 16]);

impl Uuid {
    /// Its first eight bytes.
    #[must_use]
    pub fn low(&self) -> u64 {
        u64::from_le_bytes(*self.0.first_chunk().expect("sixteen bytes"))
    }

    /// A random one (version 4).
    ///
    /// # Errors
    /// The system has no random numbers yet.
    pub fn random() -> io::Result<Self> {
        let mut bytes = [0; 16];
        let filled = getrandom(&mut bytes, GetRandomFlags::empty())?;
        if filled != bytes.len() {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        bytes[6] = bytes[6] & 0x0f | 0x40;
        bytes[8] = bytes[8] & 0x3f | 0x80;
        Ok(Self(bytes))
    }
}

impl fmt::Display for Uuid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (at, byte) in self.0.iter().enumerate() {
            if matches!(at, 4 | 6 | 8 | 10) {
                f.write_str("-")?;
            }
            write!(f, "{byte:02x}")?;
        }
        Ok(())
    }
}

/// A text is no UUID.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error(
    "not a UUID: 32 hexadecimal digits as 8-4-4-4-12, like 6ba7b810-9dad-41d1-80b4-00c04fd430c8"
)]
pub struct NotAUuid;

impl FromStr for Uuid {
    type Err = NotAUuid;

    fn from_str(text: &str) -> Result<Self, NotAUuid> {
        let is_in_place = |(at, byte): (usize, u8)| match at {
            8 | 13 | 18 | 23 => byte == b'-',
            _ => byte.is_ascii_hexdigit(),
        };
        if text.len() != 36 || !text.bytes().enumerate().all(is_in_place) {
            return Err(NotAUuid);
        }
        let digits = text.replace('-', "");
        let number = u128::from_str_radix(&digits, 16).map_err(|_| NotAUuid)?;
        Ok(Self(number.to_be_bytes()))
    }
}

/// The name that people give to a volume: up to 64 bytes of UTF-8, without control characters.
/// Empty for none.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Label(String);

/// Why a text is no label.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum NotALabel {
    /// It has too many bytes.
    #[error("a label has at most 64 bytes, this one {0}")]
    TooLong(usize),
    /// It has a character that would spoil a terminal or a list.
    #[error("a label has no control characters")]
    Control,
}

impl Label {
    /// Most bytes of a label.
    pub const BYTES_MAX: usize = 64;

    /// The label as text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for Label {
    type Err = NotALabel;

    fn from_str(text: &str) -> Result<Self, NotALabel> {
        if text.len() > Self::BYTES_MAX {
            return Err(NotALabel::TooLong(text.len()));
        }
        if text.chars().any(char::is_control) {
            return Err(NotALabel::Control);
        }
        Ok(Self(text.to_owned()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_uuid_is_written_as_it_is_read() {
        let text = "6ba7b810-9dad-41d1-80b4-00c04fd430c8";
        let uuid: Uuid = text.parse().unwrap();
        assert_eq!(uuid.0[..5], [0x6b, 0xa7, 0xb8, 0x10, 0x9d]);
        assert_eq!(uuid.to_string(), text);
        assert_eq!(text.to_uppercase().parse(), Ok(uuid));
        for bad in [
            "",
            "6ba7b8109dad41d180b400c04fd430c8",
            "6ba7b810-9dad-41d1-80b4-00c04fd430c",
            "6ba7b810-9dad-41d1-80b4-00c04fd430c8a",
            "6ba7b81-09dad-41d1-80b4-00c04fd430c8",
            "+ba7b810-9dad-41d1-80b4-00c04fd430c8",
            "6ba7b810-9dad-41d1-80b4-00c04fd430äa",
        ] {
            assert_eq!(bad.parse::<Uuid>(), Err(NotAUuid), "{bad}");
        }
    }

    #[test]
    fn random_uuids_are_of_version_4_and_differ() {
        let (a, b) = (Uuid::random().unwrap(), Uuid::random().unwrap());
        assert_ne!(a, b);
        for uuid in [a, b] {
            assert_eq!((uuid.0[6] >> 4, uuid.0[8] >> 6), (4, 2));
        }
    }

    #[test]
    fn a_label_is_short_and_printable() {
        for good in ["", "data", "Fotos & Bücher 2024", &"x".repeat(64)] {
            assert_eq!(good.parse::<Label>().unwrap().as_str(), good);
        }
        let long = "ä".repeat(33);
        assert_eq!(long.parse::<Label>(), Err(NotALabel::TooLong(66)));
        for bad in ["a\nb", "\0", "\u{85}"] {
            assert_eq!(bad.parse::<Label>(), Err(NotALabel::Control));
        }
    }
}
