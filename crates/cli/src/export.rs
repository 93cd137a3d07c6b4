//! `ramet export`: a directory tree as a PAX archive on standard output.
//!
//! The tree is read as an import reads it: by several threads, sorted. A member has its extended
//! attributes in records `SCHILY.xattr`, times with nanoseconds, and contents without holes.

use std::io::{self, BufWriter, Write};

use ramet_fs::{ImportAttr, ImportBody, ImportItem, Items, Time};
use rustix::fs::{CWD, Mode, OFlags, openat};
use tar::{Builder, EntryType, Header};

use crate::args::Export;
use crate::failure::{Failure, Outcome, status};
use crate::import::allow_open_files;
use crate::import::report::Report;
use crate::import::walk::walk;
use crate::output::{self, not_written};

/// Size of the unit of an archive.
const UNIT: u64 = 512;
/// The largest number in the field for an id, and in that for a size.
const ID_MAX: u64 = 0o7_777_777;
const SIZE_MAX: u64 = 0o77_777_777_777;
const NAME_BYTES: usize = 100;

pub fn run(args: &Export) -> Outcome<u8> {
    let out = output::bytes("an archive")?;
    allow_open_files();
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let top = openat(CWD, &args.dir, flags, Mode::empty());
    let top = top.map_err(|e| Failure::system(&args.dir, e))?;
    let report = Report::new(&args.dir);
    let out = BufWriter::with_capacity(1 << 20, out);
    let mut archive = ArchiveWriter::new(out);
    let failed = |e: io::Error| not_written(&e);
    walk(top, true, &report, &mut |frame| {
        let mut items = Items::of_frame(&frame);
        while let Some(item) = items.next_item().map_err(Failure::new_from)? {
            archive.take(&item, &report).map_err(failed)?;
        }
        Ok(())
    })?;
    archive.finish(&report).map_err(failed)?;
    Ok(if report.told() > 0 { status::FAILED } else { 0 })
}

/// A member whose extended attributes may still come.
struct Member {
    path: Vec<u8>,
    kind: EntryType,
    attr: ImportAttr,
    size_bytes: u64,
    target: Vec<u8>,
    device: u32,
    xattrs: Vec<(Vec<u8>, Vec<u8>)>,
}

struct ArchiveWriter<W: Write> {
    builder: Builder<W>,
    /// The member without its header.
    pending: Option<Member>,
    /// Attributes of objects with several names, by the first: the header of a link repeats them.
    written: u64,
    size_bytes: u64,
}

impl<W: Write> ArchiveWriter<W> {
    fn new(out: W) -> Self {
        Self {
            builder: Builder::new(out),
            pending: None,
            written: 0,
            size_bytes: 0,
        }
    }

    fn take(&mut self, item: &ImportItem<'_>, report: &Report) -> io::Result<()> {
        match *item {
            ImportItem::Object { path, attr, body } => {
                self.end_member(report)?;
                self.pending = member(path, attr, body);
                if self.pending.is_none() {
                    report.tell(path, "a socket: archives have none");
                }
            }
            ImportItem::Link { path, first } => {
                self.end_member(report)?;
                self.pending = Some(Member {
                    path: path.to_vec(),
                    kind: EntryType::Link,
                    attr: ImportAttr {
                        mode: 0o644,
                        ..ImportAttr::default()
                    },
                    size_bytes: 0,
                    target: first.to_vec(),
                    device: 0,
                    xattrs: Vec::new(),
                });
            }
            ImportItem::Xattr { name, value } => {
                if let Some(member) = &mut self.pending {
                    member.xattrs.push((name.to_vec(), value.to_vec()));
                }
            }
            ImportItem::Data { offset, bytes } => {
                self.begin_member(report)?;
                self.fill_to(offset)?;
                self.builder.get_mut().write_all(bytes)?;
                self.written += bytes.len() as u64;
            }
        }
        Ok(())
    }

    fn finish(mut self, report: &Report) -> io::Result<()> {
        self.end_member(report)?;
        self.builder.into_inner()?.flush()
    }

    /// Writes the header of the pending member.
    fn begin_member(&mut self, report: &Report) -> io::Result<()> {
        let Some(member) = self.pending.take() else {
            return Ok(());
        };
        let records = records(&member, report);
        let records = records.iter().map(|(key, value)| (&key[..], &value[..]));
        self.builder.append_pax_extensions(records)?;
        let header = header(&member)?;
        self.builder.get_mut().write_all(header.as_bytes())?;
        (self.written, self.size_bytes) = (0, member.size_bytes);
        Ok(())
    }

    fn end_member(&mut self, report: &Report) -> io::Result<()> {
        self.begin_member(report)?;
        self.fill_to(self.size_bytes)?;
        let whole = self.size_bytes.next_multiple_of(UNIT);
        self.fill_to(whole)?;
        (self.written, self.size_bytes) = (0, 0);
        Ok(())
    }

    /// Writes zeros up to an offset in the member.
    fn fill_to(&mut self, offset: u64) -> io::Result<()> {
        let missing = offset.saturating_sub(self.written);
        io::copy(
            &mut io::Read::take(io::repeat(0), missing),
            self.builder.get_mut(),
        )?;
        self.written += missing;
        Ok(())
    }
}

/// The member for an object; `None` for a socket.
fn member(path: &[u8], attr: ImportAttr, body: ImportBody<'_>) -> Option<Member> {
    let (kind, size_bytes, target, device) = match (body, attr.mode & 0o170_000) {
        (ImportBody::Directory, _) => (EntryType::Directory, 0, &b""[..], 0),
        (ImportBody::File(size_bytes), _) => (EntryType::Regular, size_bytes, &b""[..], 0),
        (ImportBody::Symlink(target), _) => (EntryType::Symlink, 0, target, 0),
        (ImportBody::Special(_), 0o010_000) => (EntryType::Fifo, 0, &b""[..], 0),
        (ImportBody::Special(device), 0o020_000) => (EntryType::Char, 0, &b""[..], device),
        (ImportBody::Special(device), 0o060_000) => (EntryType::Block, 0, &b""[..], device),
        (ImportBody::Special(_), _) => return None,
    };
    let mut path = if path.is_empty() { b"." } else { path }.to_vec();
    if kind == EntryType::Directory {
        path.push(b'/');
    }
    Some(Member {
        path,
        kind,
        attr,
        size_bytes,
        target: target.to_vec(),
        device,
        xattrs: Vec::new(),
    })
}

/// Seconds and nanoseconds as PAX tells them.
fn pax_time(time: Time) -> Vec<u8> {
    let (secs, nanos) = match time.secs < 0 && time.nanos > 0 {
        true => (time.secs + 1, 1_000_000_000 - time.nanos),
        false => (time.secs, time.nanos),
    };
    let sign = if time.secs < 0 && secs == 0 { "-" } else { "" };
    if nanos == 0 {
        return format!("{sign}{secs}").into_bytes();
    }
    format!("{sign}{secs}.{nanos:09}").into_bytes()
}

/// The records of a member that its header has no room for.
fn records(member: &Member, report: &Report) -> Vec<(String, Vec<u8>)> {
    let mut records = Vec::new();
    let mut add = |key: &str, value: Vec<u8>| records.push((key.to_owned(), value));
    if member.path.len() > NAME_BYTES {
        add("path", member.path.clone());
    }
    if member.target.len() > NAME_BYTES {
        add("linkpath", member.target.clone());
    }
    if member.kind == EntryType::Link {
        return records;
    }
    let attr = &member.attr;
    if attr.mtime.nanos > 0 || attr.mtime.secs < 0 || attr.mtime.secs > SIZE_MAX.cast_signed() {
        add("mtime", pax_time(attr.mtime));
    }
    add("atime", pax_time(attr.atime));
    for (key, id) in [("uid", attr.uid), ("gid", attr.gid)] {
        if u64::from(id) > ID_MAX {
            add(key, id.to_string().into_bytes());
        }
    }
    if member.size_bytes > SIZE_MAX {
        add("size", member.size_bytes.to_string().into_bytes());
    }
    for (name, value) in &member.xattrs {
        match std::str::from_utf8(name) {
            Ok(name) if !name.contains('=') => {
                add(&format!("SCHILY.xattr.{name}"), value.clone());
            }
            _ => report.tell(
                &member.path,
                "an attribute with a name that no archive takes",
            ),
        }
    }
    records
}

fn header(member: &Member) -> io::Result<Header> {
    let mut header = Header::new_ustar();
    header.set_entry_type(member.kind);
    if let Some(ustar) = header.as_ustar_mut() {
        let put = |field: &mut [u8], bytes: &[u8]| {
            let len = bytes.len().min(field.len());
            field[..len].copy_from_slice(&bytes[..len]);
        };
        put(&mut ustar.name, &member.path);
        put(&mut ustar.linkname, &member.target);
    }
    let attr = &member.attr;
    header.set_mode(attr.mode & 0o7777);
    header.set_uid(u64::from(attr.uid).min(ID_MAX));
    header.set_gid(u64::from(attr.gid).min(ID_MAX));
    let mtime = u64::try_from(attr.mtime.secs).unwrap_or_default();
    header.set_mtime(mtime.min(SIZE_MAX));
    header.set_size(if member.size_bytes > SIZE_MAX {
        0
    } else {
        member.size_bytes
    });
    if matches!(member.kind, EntryType::Char | EntryType::Block) {
        let (major, minor) = (
            member.device >> 8 & 0xfff,
            member.device & 0xff | member.device >> 12 & !0xff,
        );
        header.set_device_major(major)?;
        header.set_device_minor(minor)?;
    }
    header.set_cksum();
    Ok(header)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_before_1970_count_away_from_zero() {
        let text = |secs, nanos| String::from_utf8(pax_time(Time { secs, nanos })).unwrap();
        assert_eq!(text(5, 0), "5");
        assert_eq!(text(5, 7), "5.000000007");
        assert_eq!(text(-2, 750_000_000), "-1.250000000");
        assert_eq!(text(-1, 750_000_000), "-0.250000000");
        assert_eq!(text(-1, 0), "-1");
    }
}
