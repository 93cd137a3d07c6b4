//! The PAX records of the members of an archive, taken out before the library `tar` reads it.
//!
//! That library ends a record at its first newline, not by its length. A value may have newlines: an
//! access list of the user 10 has one, and so may names. So the records are read here, and the
//! library gets an archive without them: lengths and ids stand in the headers of the members. Both
//! know one length of a member, so contents are never read as headers.
//!
//! The library ends an archive at a sparse member that it cannot read. So it gets each sparse member
//! as a file that has the stored bytes, without the blocks of the map (`sparse.rs`).

use std::cell::RefCell;
use std::io::{Error, ErrorKind, Read, Result};
use std::rc::Rc;

use ramet_fs::Time;
use tar::{EntryType, GnuExtSparseHeader, Header};

use crate::import::sparse::Sparse;

const BLOCK: usize = 512;
/// Most bytes of the records of one member: as many attributes as a file may have, and its names.
const RECORDS_BYTES_MAX: u64 = 80 << 20;
/// Most bytes of a name that has a member of its own: the library reads it whole.
const NAME_BYTES_MAX: u64 = 1 << 20;
const XATTR: &[u8] = b"SCHILY.xattr.";
const SPARSE: &[u8] = b"GNU.sparse.";
/// The PAX records of a member that the import knows.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Records {
    pub path: Option<Vec<u8>>,
    /// The path of a symbolic or hard link.
    pub link: Option<Vec<u8>>,
    pub mtime: Option<Time>,
    pub atime: Option<Time>,
    pub xattrs: Vec<(Vec<u8>, Vec<u8>)>,
    /// The contents are parts of a file, in a format of GNU tar.
    pub sparse: Option<Sparse>,
}

/// The records of the member whose header was read last.
#[derive(Clone, Default)]
pub struct Member(Rc<RefCell<Records>>);

impl Member {
    /// The records; none the second time.
    pub fn take(&self) -> Records {
        self.0.take()
    }
}

/// An archive without records.
pub struct Plain<R> {
    archive: R,
    state: State,
    /// Bytes to hand out before others, and how many of them were.
    out: Vec<u8>,
    handed: usize,
    /// Those for the next member, with its numbers.
    next: Option<(Records, Numbers)>,
    member: Member,
    /// A block of zeros came where a header may be.
    has_end: bool,
}

/// Records that take the place of fields of the header.
#[derive(Default)]
struct Numbers {
    bytes: Option<u64>,
    uid: Option<u64>,
    gid: Option<u64>,
}

#[derive(Clone, Copy)]
enum State {
    /// A header comes.
    Header,
    /// So many bytes come.
    Bytes(u64),
    /// The library tells the fault, or the end.
    Rest,
}

impl<R: Read> Plain<R> {
    /// Of `archive`. The second result tells the records of each member after its header was read.
    pub fn new(archive: R) -> (Self, Member) {
        let member = Member::default();
        let plain = Self {
            archive,
            state: State::Header,
            out: Vec::new(),
            handed: 0,
            next: None,
            member: member.clone(),
            has_end: false,
        };
        (plain, member)
    }

    /// Reads on to the end behind the last member, where compressed archives have their checksum.
    ///
    /// # Errors
    /// `UnexpectedEof` for an archive without an end marker: its writer may have died between two
    /// members.
    pub fn end(mut self) -> Result<()> {
        if !self.has_end {
            let why = "it ends without an end marker, and may be cut short";
            return Err(Error::new(ErrorKind::UnexpectedEof, why));
        }
        std::io::copy(&mut self.archive, &mut std::io::sink()).map(drop)
    }

    /// Reads a block; fewer bytes at the end of the archive.
    fn block(&mut self) -> Result<Vec<u8>> {
        let mut block = Vec::with_capacity(BLOCK);
        (&mut self.archive)
            .take(BLOCK as u64)
            .read_to_end(&mut block)?;
        Ok(block)
    }

    fn header(&mut self) -> Result<()> {
        let mut block = self.block()?;
        self.state = State::Rest;
        let Some(header) = header_in(&block) else {
            if block.len() == BLOCK && block.iter().all(|&byte| byte == 0) {
                self.state = State::Header;
                self.has_end = true;
            }
            self.hand_out(block);
            return Ok(());
        };
        let Ok(mut bytes) = header.entry_size() else {
            self.hand_out(block);
            return Ok(());
        };
        let kind = header.entry_type();
        // The library takes others as members of an unknown kind.
        let is_recognized = header.as_ustar().is_some() || header.as_gnu().is_some();
        if is_recognized && kind == EntryType::XHeader {
            self.state = State::Header;
            return self.records(bytes);
        }
        let names = [EntryType::GNULongName, EntryType::GNULongLink];
        if is_recognized && names.contains(&kind) && bytes > NAME_BYTES_MAX {
            return Err(invalid("a member has a name of more than 1 MiB"));
        }
        let is_of_next = is_recognized && names.contains(&kind) || kind == EntryType::XGlobalHeader;
        if !is_of_next {
            let mut header = header.clone();
            let (mut records, numbers) = self.next.take().unwrap_or_default();
            if kind == EntryType::GNUSparse && header.as_gnu().is_some() {
                records.sparse = Some(self.sparse(&header)?);
                header.set_entry_type(EntryType::Regular);
                header.set_cksum();
            }
            bytes = numbers.bytes.unwrap_or(bytes);
            block = numbers.put(header);
            self.member.0.replace(records);
        }
        if let Some(padded) = bytes.checked_next_multiple_of(BLOCK as u64) {
            self.state = State::Bytes(padded);
        }
        self.hand_out(block);
        Ok(())
    }

    /// The sparse file of a header of GNU. Reads the blocks of its map behind the header.
    fn sparse(&mut self, header: &Header) -> Result<Sparse> {
        let header = header.as_gnu();
        let header = header.ok_or_else(|| invalid("a sparse member without a header of GNU"))?;
        let mut sparse = Sparse::of_header(header);
        let mut has_more = header.is_extended();
        while has_more {
            let block = self.block()?;
            let mut more = GnuExtSparseHeader::new();
            if block.len() < BLOCK {
                return Err(ErrorKind::UnexpectedEof.into());
            }
            more.as_mut_bytes().copy_from_slice(&block);
            sparse.add_all(more.sparse());
            has_more = more.is_extended();
        }
        Ok(sparse)
    }

    /// Reads the `bytes` behind a header of records.
    fn records(&mut self, bytes: u64) -> Result<()> {
        if bytes > RECORDS_BYTES_MAX {
            return Err(invalid("a member has more than 80 MiB of records"));
        }
        if self.next.is_some() {
            return Err(invalid("a member has its records twice"));
        }
        let mut text = Vec::new();
        let padded = bytes.next_multiple_of(BLOCK as u64);
        (&mut self.archive).take(padded).read_to_end(&mut text)?;
        if (text.len() as u64) < padded {
            return Err(ErrorKind::UnexpectedEof.into());
        }
        text.truncate(usize::try_from(bytes).unwrap_or(usize::MAX));
        let (mut records, mut numbers) = (Records::default(), Numbers::default());
        let mut rest = &text[..];
        while rest.iter().any(|&byte| byte != 0) {
            let (record, after) = split(rest).ok_or_else(|| invalid("malformed pax extension"))?;
            match record.key {
                b"size" => numbers.bytes = number(record.value),
                b"uid" => numbers.uid = number(record.value),
                b"gid" => numbers.gid = number(record.value),
                _ => records.add(&record),
            }
            rest = after;
        }
        self.next = Some((records, numbers));
        Ok(())
    }

    fn hand_out(&mut self, bytes: Vec<u8>) {
        (self.out, self.handed) = (bytes, 0);
    }
}

impl<R: Read> Read for Plain<R> {
    fn read(&mut self, buffer: &mut [u8]) -> Result<usize> {
        if buffer.is_empty() {
            return Ok(0);
        }
        loop {
            let waiting = &self.out[self.handed..];
            if !waiting.is_empty() {
                let len = waiting.len().min(buffer.len());
                buffer[..len].copy_from_slice(&waiting[..len]);
                self.handed += len;
                return Ok(len);
            }
            match self.state {
                State::Header => self.header()?,
                State::Bytes(0) => self.state = State::Header,
                State::Bytes(left) => {
                    let len = usize::try_from(left)
                        .unwrap_or(usize::MAX)
                        .min(buffer.len());
                    let read = self.archive.read(&mut buffer[..len])?;
                    self.state = State::Bytes(left - read as u64);
                    return Ok(read);
                }
                State::Rest => return self.archive.read(buffer),
            }
        }
    }
}

/// The header in a block; `None` for one that the library refuses.
fn header_in(block: &[u8]) -> Option<&Header> {
    if block.len() != BLOCK {
        return None;
    }
    let header = Header::from_byte_slice(block);
    let (before, behind) = (&block[..148], &block[156..]);
    let sum: u32 = before
        .iter()
        .chain(behind)
        .map(|&byte| u32::from(byte))
        .sum();
    let blanks = 8 * u32::from(b' ');
    (header.cksum().ok() == Some(sum + blanks)).then_some(header)
}

impl Numbers {
    /// The header with these numbers.
    fn put(&self, mut header: Header) -> Vec<u8> {
        let Numbers { bytes, uid, gid } = *self;
        if let Some(bytes) = bytes {
            header.set_size(bytes);
        }
        if let Some(uid) = uid {
            header.set_uid(uid);
        }
        if let Some(gid) = gid {
            header.set_gid(gid);
        }
        if bytes.or(uid).or(gid).is_some() {
            header.set_cksum();
        }
        header.as_bytes().to_vec()
    }
}

/// A record without its length.
struct Record<'a> {
    key: &'a [u8],
    value: &'a [u8],
}

/// The first record, `LENGTH KEY=VALUE\n`, and the bytes behind it.
fn split(text: &[u8]) -> Option<(Record<'_>, &[u8])> {
    let blank = text.iter().position(|&byte| byte == b' ')?;
    let length = usize::try_from(number(&text[..blank])?).ok()?;
    let (whole, after) = text.split_at_checked(length)?;
    let pair = whole.get(blank + 1..)?.strip_suffix(b"\n")?;
    let equals = pair.iter().position(|&byte| byte == b'=')?;
    let (key, value) = (&pair[..equals], &pair[equals + 1..]);
    Some((Record { key, value }, after))
}

fn number(text: &[u8]) -> Option<u64> {
    std::str::from_utf8(text).ok()?.parse().ok()
}

fn invalid(why: &str) -> Error {
    Error::new(ErrorKind::InvalidData, why)
}

impl Records {
    fn add(&mut self, record: &Record<'_>) {
        let value = record.value;
        let some = || (!value.is_empty()).then(|| value.to_vec());
        match record.key {
            b"path" => self.path = some(),
            b"linkpath" => self.link = some(),
            b"mtime" => self.mtime = parse_time(value),
            b"atime" => self.atime = parse_time(value),
            key => {
                if let Some(key) = key.strip_prefix(SPARSE) {
                    let sparse = self.sparse.get_or_insert_default();
                    sparse.take(key, value);
                }
                if let Some(name) = key.strip_prefix(XATTR) {
                    self.xattrs.push((name.to_vec(), value.to_vec()));
                }
            }
        }
    }
}

/// A time as PAX tells it: seconds, with a fraction.
fn parse_time(text: &[u8]) -> Option<Time> {
    let text = std::str::from_utf8(text).ok()?;
    let (whole, fraction) = text.split_once('.').unwrap_or((text, ""));
    let secs: i64 = whole.parse().ok()?;
    let digits: String = fraction
        .chars()
        .chain("000000000".chars())
        .take(9)
        .collect();
    let nanos: u32 = digits.parse().ok()?;
    // The fraction counts away from zero, the nanoseconds of a time count upwards.
    if whole.starts_with('-') && nanos > 0 {
        let secs = secs.checked_sub(1)?;
        return Some(Time {
            secs,
            nanos: 1_000_000_000 - nanos,
        });
    }
    Some(Time { secs, nanos })
}

#[cfg(test)]
mod tests {
    use std::io::BufReader;

    use tar::{Archive, Builder};

    use super::*;

    #[test]
    fn times_of_pax_have_fractions() {
        let time = |secs, nanos| Some(Time { secs, nanos });
        assert_eq!(parse_time(b"12"), time(12, 0));
        assert_eq!(parse_time(b"12.5"), time(12, 500_000_000));
        assert_eq!(parse_time(b"12.0000000019"), time(12, 1));
        assert_eq!(parse_time(b"-1.25"), time(-2, 750_000_000));
        assert_eq!(parse_time(b"x"), None);
    }

    /// A member with records, and a second one without.
    fn archive(records: &[(&str, &[u8])], contents: &[u8]) -> Vec<u8> {
        let mut archive = Builder::new(Vec::new());
        archive
            .append_pax_extensions(records.iter().copied())
            .unwrap();
        for (name, contents) in [("short", contents), ("second", b"plain")] {
            let mut header = Header::new_ustar();
            header.set_size(contents.len() as u64);
            header.set_path(name).unwrap();
            header.set_cksum();
            archive.append(&header, contents).unwrap();
        }
        archive.into_inner().unwrap()
    }

    /// The records, the id and the contents of each member, as the library reads them behind
    /// [`Plain`]. It gets few bytes at a time.
    fn members(archive: &[u8], at_once: usize) -> Result<Vec<(Records, u64, Vec<u8>)>> {
        let (plain, of_member) = Plain::new(BufReader::with_capacity(at_once, archive));
        let mut members = Vec::new();
        for member in Archive::new(plain).entries()? {
            let mut member = member?;
            let (records, mut contents) = (of_member.take(), Vec::new());
            member.read_to_end(&mut contents)?;
            members.push((records, member.header().uid().unwrap_or_default(), contents));
        }
        Ok(members)
    }

    #[test]
    fn values_may_have_newlines_and_each_byte() {
        let all: Vec<u8> = (0..=255).collect();
        let records: [(&str, &[u8]); 6] = [
            ("SCHILY.xattr.user.all", &all),
            ("path", b"a name\nof two lines"),
            ("linkpath", b"13 path=x\n\n"),
            ("uid", b"4000000000"),
            ("SCHILY.xattr.user.none", b""),
            ("mtime", b"12.5"),
        ];
        let archive = archive(&records, b"contents");
        let expected = Records {
            path: Some(b"a name\nof two lines".to_vec()),
            link: Some(b"13 path=x\n\n".to_vec()),
            mtime: parse_time(b"12.5"),
            atime: None,
            xattrs: vec![
                (b"user.all".to_vec(), all),
                (b"user.none".to_vec(), Vec::new()),
            ],
            sparse: None,
        };
        for at_once in [1, 511, 513, 1 << 20] {
            let members = members(&archive, at_once).unwrap();
            let [(records, uid, contents), (none, _, plain)] = &members[..] else {
                panic!("two members");
            };
            assert_eq!(*records, expected);
            assert_eq!((*uid, &contents[..]), (4_000_000_000, &b"contents"[..]));
            assert_eq!((none, &plain[..]), (&Records::default(), &b"plain"[..]));
        }
    }

    #[test]
    fn a_length_in_a_record_counts_before_that_of_the_header() {
        let mut archive = archive(
            &[("SCHILY.xattr.user.a", b"\n"), ("size", b"700")],
            &[7; 700],
        );
        // The header of the member tells another length.
        let at = 2 * BLOCK;
        let mut header = Header::from_byte_slice(&archive[at..at + BLOCK]).clone();
        assert_eq!(header.path_bytes(), &b"short"[..]);
        header.set_size(0);
        header.set_cksum();
        archive[at..at + BLOCK].copy_from_slice(header.as_bytes());
        let members = members(&archive, 100).unwrap();
        assert_eq!((members.len(), &members[0].2), (2, &vec![7; 700]));
    }

    /// The header of a member with contents, and those.
    fn member(kind: u8, header: Header, contents: &[u8]) -> Vec<u8> {
        let mut header = header;
        header.set_entry_type(EntryType::new(kind));
        header.set_path("some").unwrap();
        header.set_mode(0o644);
        header.set_size(contents.len() as u64);
        header.set_cksum();
        let mut bytes = [header.as_bytes(), contents].concat();
        bytes.resize(bytes.len().next_multiple_of(BLOCK), 0);
        bytes
    }

    #[test]
    fn an_archive_without_an_end_marker_may_be_cut_short() {
        let whole = archive(&[("SCHILY.xattr.user.a", b"1")], b"contents");
        let end = |archive: &[u8]| {
            let (mut plain, _) = Plain::new(archive);
            std::io::copy(&mut plain, &mut std::io::sink())?;
            plain.end()
        };
        end(&whole).unwrap();
        let members = &whole[..whole.len() - 2 * BLOCK];
        for cut in [&b""[..], members, &members[..members.len() - 2 * BLOCK]] {
            let error = end(cut).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::UnexpectedEof, "{}", cut.len());
        }
        end(&whole[..whole.len() - BLOCK]).unwrap();
    }

    #[test]
    fn a_long_name_is_not_read_without_bound() {
        let mut header = Header::new_gnu();
        header.set_entry_type(EntryType::GNULongName);
        header.set_size(NAME_BYTES_MAX + 1);
        header.set_cksum();
        let endless = header.as_bytes().chain(std::io::repeat(b'a'));
        let mut entries = Archive::new(Plain::new(endless).0);
        let error = entries.entries().unwrap().next().unwrap().err().unwrap();
        assert_eq!(error.kind(), ErrorKind::InvalidData);
    }

    #[test]
    fn the_map_of_a_sparse_member_is_not_kept_without_bound() {
        let mut header = Header::new_gnu();
        header.set_entry_type(EntryType::GNUSparse);
        header.set_size(0);
        header.as_gnu_mut().unwrap().isextended = [1];
        header.set_cksum();
        // Parts of no bytes.
        let mut more = GnuExtSparseHeader::new();
        more.as_mut_bytes().fill(b'0');
        more.set_is_extended(true);
        let map = more.as_bytes().repeat(100_000);
        more.set_is_extended(false);
        let last = member(b'0', Header::new_ustar(), b"last");
        let archive = [header.as_bytes(), &map[..], more.as_bytes(), &last].concat();
        let members = members(&archive, 1 << 20).unwrap();
        let [(records, _, none), (_, _, last)] = &members[..] else {
            panic!("two members");
        };
        assert_eq!((&none[..], &last[..]), (&b""[..], &b"last"[..]));
        let sparse = records.sparse.as_ref().unwrap();
        assert!(sparse.clone().map(0, std::io::empty()).unwrap().is_err());
    }

    #[test]
    fn contents_are_never_read_as_headers() {
        let hidden = member(b'0', Header::new_ustar(), b"hidden");
        let long = |records: &[u8]| member(b'x', Header::new_ustar(), records);
        // A length told twice; in a value; before another header of records; in a header of old.
        let twice = b"10 size=1\n13 size=1024\n";
        let heads = [
            long(twice),
            long(b"23 uid=1\n13 size=1024\n\n13 size=1024\n"),
            [
                long(b"13 size=1024\n"),
                member(b'g', Header::new_ustar(), b""),
            ]
            .concat(),
            [
                long(b"13 size=1024\n"),
                member(b'L', Header::new_gnu(), b"a name\0"),
            ]
            .concat(),
        ];
        for head in heads {
            let mut carrier = member(b'0', Header::new_ustar(), b"");
            carrier.extend_from_slice(&hidden);
            let archive = [head, carrier, member(b'0', Header::new_ustar(), b"last")].concat();
            let contents: Vec<_> = members(&archive, 100).unwrap();
            let contents: Vec<_> = contents.into_iter().map(|(_, _, found)| found).collect();
            let last = b"last".to_vec();
            let is_right = |found: &[Vec<u8>]| found == [hidden.clone(), last.clone()];
            let with_global = contents.first().is_some_and(Vec::is_empty);
            assert!(
                is_right(&contents[usize::from(with_global)..]),
                "{contents:?}"
            );
        }
        // The library knows no records in a header of old, so they are no records.
        let old = member(b'x', Header::new_old(), b"13 size=1024\n");
        let archive = [old, member(b'0', Header::new_ustar(), b""), hidden].concat();
        assert_eq!(members(&archive, 100).unwrap().len(), 3);
    }

    #[test]
    fn archives_that_end_early_or_lie_are_refused_or_end() {
        let whole = archive(&[("SCHILY.xattr.user.a", b"a\nb")], &[1; 1000]);
        for end in 0..whole.len() {
            let _ = members(&whole[..end], 64);
        }
        for (at, byte) in [(BLOCK, b'9'), (BLOCK + 1, b'x'), (BLOCK + 2, b'?')] {
            let mut spoilt = whole.clone();
            spoilt[at] = byte;
            let error = members(&spoilt, 64).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidData, "{at}");
        }
        let mut twice = archive(&[("path", b"a")], b"");
        let again = twice[..2 * BLOCK].to_vec();
        twice.splice(0..0, again);
        assert!(members(&twice, 64).is_err());
    }
}
