//! Archives that are compressed, told by their first bytes: gzip and Zstandard.

use std::io::{BufReader, Cursor, Read, Result};

use flate2::read::MultiGzDecoder;
use zstd::stream::read::Decoder;

const GZIP: &[u8] = b"\x1f\x8b";
const ZSTD: &[u8] = b"\x28\xb5\x2f\xfd";
/// Formats that other programs unpack: bytes that tell them, at an offset, and the program. The
/// first bytes of an archive are a file name, which may begin with `BZh`.
const OTHERS: [(usize, &[u8], &str); 3] = [
    (0, b"\xfd7zXZ\0", "xz"),
    (4, b"1AY&SY", "bzip2"),
    (0, b"\x04\x22\x4d\x18", "lz4"),
];
/// Bytes that tell a format.
const HEAD_BYTES: usize = 10;
const BUFFER_BYTES: usize = 1 << 20;

/// An archive as it is read.
pub enum Unpacked {
    /// The bytes of the archive itself.
    Archive(Box<dyn Read>),
    /// The archive is in a format that this program unpacks.
    Other(&'static str),
}

/// Unpacks an archive that may be compressed.
///
/// # Errors
/// Those of the source.
pub fn unpacked(mut source: impl Read + 'static) -> Result<Unpacked> {
    let mut head = Vec::with_capacity(HEAD_BYTES);
    source
        .by_ref()
        .take(HEAD_BYTES as u64)
        .read_to_end(&mut head)?;
    let is_there = |at: usize, bytes: &[u8]| head.get(at..).is_some_and(|b| b.starts_with(bytes));
    let other = OTHERS.iter().find(|(at, bytes, _)| is_there(*at, bytes));
    if let Some((_, _, program)) = other {
        return Ok(Unpacked::Other(program));
    }
    let (is_gzip, is_zstd) = (head.starts_with(GZIP), head.starts_with(ZSTD));
    let whole = Cursor::new(head).chain(source);
    Ok(Unpacked::Archive(if is_gzip {
        let whole = BufReader::with_capacity(BUFFER_BYTES, whole);
        Box::new(MultiGzDecoder::new(whole))
    } else if is_zstd {
        Box::new(Decoder::new(whole)?)
    } else {
        Box::new(whole)
    }))
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    fn read(bytes: &[u8]) -> Result<Vec<u8>> {
        let Unpacked::Archive(mut archive) = unpacked(Cursor::new(bytes.to_vec()))? else {
            panic!("another program unpacks these");
        };
        let mut read = Vec::new();
        archive.read_to_end(&mut read)?;
        Ok(read)
    }

    #[test]
    fn formats_are_told_by_their_first_bytes() {
        let plain: Vec<u8> = (0..100_000_u32).map(|at| (at / 3) as u8).collect();
        let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        gzip.write_all(&plain).unwrap();
        let gzip = gzip.finish().unwrap();
        let zstd = zstd::encode_all(&plain[..], 1).unwrap();
        for packed in [&plain, &gzip, &zstd] {
            assert_eq!(read(packed).unwrap(), plain);
        }
        // A file of several parts is all of them.
        assert_eq!(read(&gzip.repeat(2)).unwrap(), plain.repeat(2));
        assert_eq!(read(&zstd.repeat(2)).unwrap(), plain.repeat(2));
        for short in [&b""[..], b"a", b"\x1f"] {
            assert_eq!(read(short).unwrap(), short);
        }
        for cut in [&gzip[..gzip.len() / 2], &zstd[..zstd.len() / 2]] {
            assert!(read(cut).is_err());
        }
        let xz = unpacked(Cursor::new(b"\xfd7zXZ\0rest".to_vec())).unwrap();
        assert!(matches!(xz, Unpacked::Other("xz")));
        assert_eq!(read(b"BZh is a name").unwrap(), b"BZh is a name");
    }
}
