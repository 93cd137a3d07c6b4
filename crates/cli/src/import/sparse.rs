//! Sparse files in an archive, in the formats of GNU tar: the parts that are no holes, with their
//! places.
//!
//! | format | map of the parts |
//! | --- | --- |
//! | header of GNU | in the header, and in blocks behind it |
//! | PAX 0.0 | records `GNU.sparse.offset` and `GNU.sparse.numbytes`, a pair for each part |
//! | PAX 0.1 | the record `GNU.sparse.map`: numbers with commas between them |
//! | PAX 1.0 | before the contents: lines with the count and with two numbers for each part |
//!
//! A map that is damaged or too large is a fault of one member: the others come all the same.

use std::io::{Read, Result};

use tar::{GnuHeader, GnuSparseHeader};

const BLOCK: usize = 512;
/// Most parts of a file: the whole map is in memory.
const PARTS_MAX: usize = 1 << 21;
/// Most digits of a number in a map.
const DIGITS_MAX: usize = 20;
const DAMAGED: &str = "a sparse file whose map is damaged";
const TOO_MANY: &str = "a sparse file of more than two million parts";

/// A part that is no hole: its offset and its length.
pub type Part = (u64, u64);

/// The reason for which a member is no file.
pub type Unfit = &'static str;

/// A sparse file, as the headers before its contents tell it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Sparse {
    size_bytes: Option<u64>,
    parts: Vec<Part>,
    /// The offset of a part whose length follows.
    offset: Option<u64>,
    /// The map is before the contents.
    has_map_in_contents: bool,
    /// The path of the file, where the header of the member has another one.
    path: Option<Vec<u8>>,
    fault: Option<Unfit>,
}

/// A sparse file whose parts ascend, lie inside, and are all of the contents that follow.
#[derive(Debug, PartialEq, Eq)]
pub struct Map {
    pub size_bytes: u64,
    pub parts: Vec<Part>,
}

impl Sparse {
    /// Of a header of GNU, without the blocks behind it.
    pub fn of_header(header: &GnuHeader) -> Sparse {
        let mut sparse = Sparse {
            size_bytes: header.real_size().ok(),
            ..Sparse::default()
        };
        sparse.add_all(&header.sparse);
        sparse
    }

    /// Adds parts that a header tells.
    pub fn add_all(&mut self, told: &[GnuSparseHeader]) {
        for part in told.iter().filter(|part| !part.is_empty()) {
            let pair = part.offset().ok().zip(part.length().ok());
            self.add(pair);
        }
    }

    fn add(&mut self, part: Option<Part>) {
        match part {
            Some(part) if self.parts.len() < PARTS_MAX => self.parts.push(part),
            Some(_) => self.fault = Some(TOO_MANY),
            None => self.fault = Some(DAMAGED),
        }
    }

    /// The path of the file, if it is not that of the member.
    pub fn path(&self) -> Option<&[u8]> {
        self.path.as_deref()
    }

    /// Takes the record `GNU.sparse.` and `key` of PAX.
    pub fn take(&mut self, key: &[u8], value: &[u8]) {
        match key {
            b"size" | b"realsize" => self.size_bytes = number(value),
            b"major" => self.has_map_in_contents = value == b"1",
            b"name" => self.path = (!value.is_empty()).then(|| value.to_vec()),
            b"offset" => self.offset = number(value),
            b"numbytes" => {
                let part = self.offset.take().zip(number(value));
                self.add(part);
            }
            b"map" => {
                let mut numbers = value.split(|&byte| byte == b',').map(number);
                while let Some(offset) = numbers.next() {
                    let part = offset.zip(numbers.next().flatten());
                    self.add(part);
                }
            }
            _ => {}
        }
    }

    /// The map of a member with `stored` bytes. Where it is before the contents, it is read.
    ///
    /// # Errors
    /// Those of the archive.
    pub fn map(
        mut self,
        stored: u64,
        contents: impl Read,
    ) -> Result<std::result::Result<Map, Unfit>> {
        let mut left = stored;
        if self.has_map_in_contents && self.fault.is_none() {
            let mut lines = Lines {
                contents,
                left,
                block: [0; BLOCK],
                at: BLOCK,
            };
            self.fault = lines.read_parts(&mut self.parts)?.err();
            left = lines.left;
        }
        Ok(match (self.fault, self.size_bytes) {
            (Some(why), _) => Err(why),
            (None, Some(size_bytes)) if is_whole(&self.parts, size_bytes, left) => Ok(Map {
                size_bytes,
                parts: self.parts,
            }),
            _ => Err(DAMAGED),
        })
    }
}

/// Whether the parts ascend in a file of this size and have so many bytes.
fn is_whole(parts: &[Part], size_bytes: u64, stored: u64) -> bool {
    let (mut at, mut sum) = (0, 0);
    for (offset, bytes) in parts {
        match offset.checked_add(*bytes) {
            Some(end) if *offset >= at && end <= size_bytes => at = end,
            _ => return false,
        }
        sum += bytes;
    }
    sum == stored
}

/// Lines with numbers in the first blocks of contents.
struct Lines<R> {
    contents: R,
    /// Bytes of the contents behind the block.
    left: u64,
    block: [u8; BLOCK],
    /// Bytes of the block that were read.
    at: usize,
}

impl<R: Read> Lines<R> {
    fn read_parts(&mut self, parts: &mut Vec<Part>) -> Result<std::result::Result<(), Unfit>> {
        let Some(count) = self.number()? else {
            return Ok(Err(DAMAGED));
        };
        if count > PARTS_MAX as u64 {
            return Ok(Err(TOO_MANY));
        }
        for _ in 0..count {
            match self.number()?.zip(self.number()?) {
                Some(part) => parts.push(part),
                None => return Ok(Err(DAMAGED)),
            }
        }
        Ok(Ok(()))
    }

    /// The number on the next line; none if the line has none.
    fn number(&mut self) -> Result<Option<u64>> {
        let mut digits = Vec::new();
        while digits.len() <= DIGITS_MAX {
            if self.at == BLOCK {
                let Some(left) = self.left.checked_sub(BLOCK as u64) else {
                    return Ok(None);
                };
                self.contents.read_exact(&mut self.block)?;
                (self.left, self.at) = (left, 0);
            }
            let byte = self.block[self.at];
            self.at += 1;
            if byte == b'\n' {
                return Ok(number(&digits));
            }
            digits.push(byte);
        }
        Ok(None)
    }
}

fn number(text: &[u8]) -> Option<u64> {
    if !text.iter().all(u8::is_ascii_digit) {
        return None;
    }
    std::str::from_utf8(text).ok()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The map that these records tell, before `contents`.
    fn map(records: &[(&str, &str)], contents: &[u8]) -> std::result::Result<Map, Unfit> {
        let mut sparse = Sparse::default();
        for (key, value) in records {
            sparse.take(key.as_bytes(), value.as_bytes());
        }
        sparse.map(contents.len() as u64, contents).unwrap()
    }

    #[test]
    fn each_format_of_pax_tells_the_same_map() {
        let expected = Ok(Map {
            size_bytes: 100,
            parts: vec![(0, 1), (10, 3), (100, 0)],
        });
        let pairs = [("0", "1"), ("10", "3"), ("100", "0")];
        let mut records = vec![("size", "100"), ("numblocks", "3")];
        for (offset, bytes) in pairs {
            records.extend([("offset", offset), ("numbytes", bytes)]);
        }
        assert_eq!(map(&records, &[0; 4]), expected);
        let records = [("size", "100"), ("map", "0,1,10,3,100,0")];
        assert_eq!(map(&records, &[0; 4]), expected);
        let mut contents = b"3\n0\n1\n10\n3\n100\n0\n".to_vec();
        contents.resize(BLOCK + 4, 0);
        let records = [("major", "1"), ("minor", "0"), ("realsize", "100")];
        assert_eq!(map(&records, &contents), expected);
    }

    #[test]
    fn a_map_that_lies_is_a_fault() {
        let of_text = |text: &str, stored: usize| {
            let records = [("size", "100"), ("map", text)];
            map(&records, &vec![0; stored])
        };
        of_text("", 0).unwrap_err();
        of_text("0,4", 4).unwrap();
        for (text, stored) in [
            ("0,4", 5),
            ("0,4,3,1", 5),
            ("4,4,0,4", 8),
            ("97,4", 4),
            ("18446744073709551615,4", 4),
            ("0", 0),
            ("0,+4", 4),
            ("0,4,", 4),
        ] {
            assert_eq!(of_text(text, stored), Err(DAMAGED), "{text}");
        }
        assert_eq!(map(&[("map", "0,4")], &[0; 4]), Err(DAMAGED));
        let first = [("major", "1"), ("realsize", "100")];
        for text in ["", "1\n", "1\n0\n", "x\n", "1\n0\n123456789012345678901\n"] {
            for stored in [0, 100, BLOCK] {
                let mut contents = text.as_bytes().to_vec();
                contents.resize(stored, 0);
                assert_eq!(map(&first, &contents), Err(DAMAGED), "{text:?} {stored}");
            }
        }
        let mut many = format!("{}\n", PARTS_MAX + 1).into_bytes();
        many.resize(BLOCK, 0);
        assert_eq!(map(&first, &many), Err(TOO_MANY));
        let many = "0,0,".repeat(PARTS_MAX) + "0,4";
        assert_eq!(of_text(&many, 4), Err(TOO_MANY));
    }
}
