//! A tar archive as the source of an import: GNU and PAX, with extended attributes in records
//! `SCHILY.xattr`.
//!
//! Members come in the order of the archive. A directory that no member makes before its entries
//! gets the mode 0755 and the caller's ids. The first member of a path counts.
//!
//! A few bytes of a compressed archive may be a path of many thousand directories. A path so long is
//! taken only where each of them has a member of its own.

use std::io::Read;

use ramet_fs::{
    BLOCK_BYTES, FILE_BYTES_MAX, IMPORT_PATH_BYTES_MAX, ImportAttr, ImportBody, ImportItem,
    NAME_BYTES_MAX, TARGET_BYTES_MAX, Time, XATTR_BYTES_MAX,
};
use rustix::process::{getegid, geteuid};
use tar::{Archive, Entry, EntryType};

use crate::failure::{Failure, Outcome};
use crate::import::made::{Made, NoDirectory, ends_above};
use crate::import::pax::{Plain, Records};
use crate::import::read::Frames;
use crate::import::report::Report;

/// Longest path of a member above which directories are missing: the longest that programs can name.
const PATH_BYTES_MAX: usize = 4095;

/// Hands the members of an archive to `deliver`, frame by frame.
///
/// # Errors
/// Those of `deliver`, and of an archive that cannot be read on.
pub fn read(
    source: Box<dyn Read>,
    makes_devices: bool,
    report: &Report,
    deliver: &mut dyn FnMut(Vec<u8>) -> Outcome,
) -> Outcome {
    let mut failed = Ok(());
    let mut out = |frame| {
        failed = deliver(frame);
        failed.is_ok()
    };
    let mut importer = Importer {
        frames: Frames::new(&mut out),
        report,
        makes_devices,
        made: Made::default(),
        now: now(),
    };
    let broken = |e: std::io::Error| Failure::new(format!("the archive cannot be read on: {e}"));
    let read_all = |importer: &mut Importer<'_>| -> Outcome {
        let source = std::io::BufReader::with_capacity(1 << 20, source);
        let (plain, of_member) = Plain::new(source);
        let mut archive = Archive::new(plain);
        for member in archive.entries().map_err(broken)? {
            let member = member.map_err(broken)?;
            let taken = importer.take(member, of_member.take());
            taken.map_err(broken)?;
            if importer.frames.is_cut() {
                return Ok(());
            }
        }
        archive.into_inner().end().map_err(broken)
    };
    let read = read_all(&mut importer);
    importer.frames.flush();
    drop(importer);
    failed?;
    read
}

fn now() -> Time {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    let now = now.unwrap_or_default();
    Time {
        secs: i64::try_from(now.as_secs()).unwrap_or_default(),
        nanos: now.subsec_nanos(),
    }
}

/// The names of a path, joined; `None` for a path that leads out of the archive.
fn normal(path: &[u8]) -> Option<Vec<u8>> {
    let names = path.split(|&byte| byte == b'/');
    let names: Vec<_> = names
        .filter(|name| !name.is_empty() && *name != b".")
        .collect();
    let leads_out = names.contains(&&b".."[..]) || path.len() > IMPORT_PATH_BYTES_MAX;
    (!leads_out).then(|| names.join(&b'/'))
}

/// The reason for which no object can have the path.
fn unfit(path: &[u8]) -> Option<&'static str> {
    let mut names = path.split(|&byte| byte == b'/');
    if names.any(|name| name.len() > NAME_BYTES_MAX) {
        return Some("has a name of more than 255 bytes");
    }
    path.contains(&0).then_some("has a zero byte in a name")
}

struct Importer<'a> {
    frames: Frames<'a>,
    report: &'a Report,
    makes_devices: bool,
    made: Made,
    now: Time,
}

impl Importer<'_> {
    fn take<R: Read>(&mut self, mut member: Entry<'_, R>, records: Records) -> std::io::Result<()> {
        let kind = member.header().entry_type();
        if kind == EntryType::XGlobalHeader {
            return Ok(());
        }
        let raw = records.path.clone();
        let raw = raw.unwrap_or_else(|| member.path_bytes().into_owned());
        let Some(path) = normal(&raw) else {
            self.report
                .tell(&raw, "leads out of the archive, or is longer than 128 KiB");
            return Ok(());
        };
        if let Some(why) = unfit(&path) {
            self.report.tell(&raw, why);
            return Ok(());
        }
        let is_directory = kind == EntryType::Directory;
        if !self.takes(&path, is_directory) {
            return Ok(());
        }
        let mut attr = self.attr(&member, &records)?;
        let link = || Some(member.link_name_bytes()?.into_owned());
        let target = records.link.clone().or_else(link).unwrap_or_default();
        if kind == EntryType::Link {
            return self.link(path, &target);
        }
        let (bits, body) = match self.body(&member, &records, &target)? {
            Ok(found) => found,
            Err(why) => {
                self.report.tell(&path, why);
                return Ok(());
            }
        };
        attr.mode |= bits;
        let path_of_item = &path[..];
        let item = ImportItem::Object {
            path: path_of_item,
            attr,
            body,
        };
        self.frames.put(&item, path.len() + target.len());
        for (name, value) in &records.xattrs {
            if name.len() > NAME_BYTES_MAX || value.len() > XATTR_BYTES_MAX {
                let why = "an extended attribute, or its name, is too large";
                self.report.tell(&path, why);
                continue;
            }
            let item = ImportItem::Xattr { name, value };
            self.frames.put(&item, name.len() + value.len());
        }
        self.made.insert(&path, is_directory);
        if let ImportBody::File(size_bytes) = body {
            self.contents(&mut member, size_bytes, kind == EntryType::GNUSparse)?;
        }
        Ok(())
    }

    /// The type bits of a member and its contents, or the reason for which no object can be it.
    fn body<'t, R: Read>(
        &self,
        member: &Entry<'_, R>,
        records: &Records,
        target: &'t [u8],
    ) -> std::io::Result<std::result::Result<(u32, ImportBody<'t>), &'static str>> {
        use EntryType::{Block, Char, Continuous, Directory, Fifo, GNUSparse, Regular, Symlink};
        let is_target = (1..=TARGET_BYTES_MAX).contains(&target.len()) && !target.contains(&0);
        Ok(match member.header().entry_type() {
            Directory => Ok((0o040_000, ImportBody::Directory)),
            Symlink if !is_target => Err("a symbolic link without a target that it may have"),
            Symlink => Ok((0o120_000, ImportBody::Symlink(target))),
            Fifo => Ok((0o010_000, ImportBody::Special(0))),
            Char | Block if !self.makes_devices => Err("a device: only root may make one"),
            Char => Ok((0o020_000, ImportBody::Special(device(member)?))),
            Block => Ok((0o060_000, ImportBody::Special(device(member)?))),
            Regular | Continuous | GNUSparse if !records.is_sparse => match member.size() {
                size_bytes if size_bytes > FILE_BYTES_MAX => Err("larger than a file may be"),
                size_bytes => Ok((0o100_000, ImportBody::File(size_bytes))),
            },
            _ => Err("a member of a kind that is not known"),
        })
    }

    /// Whether an object can be made at a path. Directories above it that are missing are made.
    fn takes(&mut self, path: &[u8], is_directory: bool) -> bool {
        if path.is_empty() {
            return is_directory;
        }
        match self.made.is_directory(path) {
            Some(true) if is_directory => return true,
            Some(_) => {
                self.report
                    .tell(path, "a second member of this path: the first one stays");
                return false;
            }
            None => {}
        }
        match self.made.missing_above(path) {
            Ok(None) => true,
            Ok(Some(_)) if path.len() > PATH_BYTES_MAX => {
                let why = "is longer than 4 KiB, and a directory above it is no member";
                self.report.tell(path, why);
                false
            }
            Ok(Some(first)) => {
                self.make_above(path, first);
                true
            }
            Err(NoDirectory) => {
                self.report
                    .tell(path, "below a member that is no directory");
                false
            }
        }
    }

    /// Makes the directories above `path`, from that whose path has the length `first` on.
    fn make_above(&mut self, path: &[u8], first: usize) {
        let attr = ImportAttr {
            mode: 0o040_755,
            uid: geteuid().as_raw(),
            gid: getegid().as_raw(),
            atime: self.now,
            mtime: self.now,
            has_names: false,
        };
        let body = ImportBody::Directory;
        for end in ends_above(path).filter(|end| *end >= first) {
            let path = &path[..end];
            self.frames
                .put(&ImportItem::Object { path, attr, body }, path.len());
            self.made.insert(path, true);
        }
    }

    fn attr<R: Read>(
        &self,
        member: &Entry<'_, R>,
        records: &Records,
    ) -> std::io::Result<ImportAttr> {
        let header = member.header();
        let mtime = Time {
            // Times before 1970 of the format of GNU tar are negative numbers of 64 bits.
            secs: header.mtime()?.cast_signed(),
            nanos: 0,
        };
        let mtime = records.mtime.unwrap_or(mtime);
        let id = |id: u64| u32::try_from(id).unwrap_or(u32::MAX - 1);
        Ok(ImportAttr {
            mode: header.mode()? & 0o7777,
            uid: id(header.uid()?),
            gid: id(header.gid()?),
            atime: records.atime.unwrap_or(mtime),
            mtime,
            has_names: false,
        })
    }

    fn link(&mut self, path: Vec<u8>, target: &[u8]) -> std::io::Result<()> {
        let first = normal(target).filter(|first| self.made.is_directory(first) == Some(false));
        let Some(first) = first else {
            self.report
                .tell(&path, "a link to a member that did not come");
            return Ok(());
        };
        let item = ImportItem::Link {
            path: &path,
            first: &first,
        };
        self.frames.put(&item, path.len() + first.len());
        self.made.insert(&path, false);
        Ok(())
    }

    fn contents(
        &mut self,
        member: &mut impl Read,
        size_bytes: u64,
        is_sparse: bool,
    ) -> std::io::Result<()> {
        let mut scratch = vec![0; usize::try_from(size_bytes.min(1 << 20)).unwrap_or(1 << 20)];
        let mut at = 0;
        while at < size_bytes && !self.frames.is_cut() {
            let len = self.frames.room(size_bytes - at);
            let bytes = &mut scratch[..len];
            member.read_exact(bytes)?;
            if is_sparse {
                self.put_without_zeros(at, bytes);
            } else {
                self.frames
                    .put(&ImportItem::Data { offset: at, bytes }, len);
            }
            at += len as u64;
        }
        Ok(())
    }

    /// Puts contents without blocks of zeros, which are the holes of a sparse member.
    fn put_without_zeros(&mut self, mut offset: u64, bytes: &[u8]) {
        for bytes in bytes.chunks(usize::try_from(BLOCK_BYTES).unwrap_or(usize::MAX)) {
            if bytes.iter().any(|&byte| byte != 0) {
                self.frames
                    .put(&ImportItem::Data { offset, bytes }, bytes.len());
            }
            offset += bytes.len() as u64;
        }
    }
}

fn device<R: Read>(member: &Entry<'_, R>) -> std::io::Result<u32> {
    let header = member.header();
    let major = header.device_major()?.unwrap_or_default();
    let minor = header.device_minor()?.unwrap_or_default();
    Ok(minor & 0xff | major << 8 | (minor & !0xff) << 12)
}

#[cfg(test)]
mod tests {
    use crate::import::unpack::{Unpacked, unpacked};

    use super::*;

    #[test]
    fn paths_stay_inside() {
        assert_eq!(normal(b"./a//b/"), Some(b"a/b".to_vec()));
        assert_eq!(normal(b"/etc/x"), Some(b"etc/x".to_vec()));
        assert_eq!(normal(b"./"), Some(Vec::new()));
        assert_eq!(normal(b"a/../../b"), None);
    }

    /// Imports an archive whose frames go nowhere.
    fn import(archive: Vec<u8>) -> Outcome {
        let report = Report::new(std::path::Path::new("x"));
        let Unpacked::Archive(source) = unpacked(std::io::Cursor::new(archive)).unwrap() else {
            panic!("another program unpacks it");
        };
        read(source, false, &report, &mut |_| Ok(()))
    }

    #[test]
    fn a_damaged_or_cut_archive_is_refused() {
        let mut archive = tar::Builder::new(Vec::new());
        let mut header = tar::Header::new_gnu();
        header.set_size(3);
        header.set_mode(0o644);
        header.set_uid(0);
        header.set_gid(0);
        header.set_mtime(0);
        header.set_cksum();
        archive.append_data(&mut header, "a", &b"abc"[..]).unwrap();
        let plain = archive.into_inner().unwrap();
        let level = flate2::Compression::none();
        let mut gzip = flate2::write::GzEncoder::new(Vec::new(), level);
        std::io::Write::write_all(&mut gzip, &plain).unwrap();
        let gzip = gzip.finish().unwrap();
        import(plain.clone()).unwrap();
        import(gzip.clone()).unwrap();
        import(plain[..1024].to_vec()).unwrap_err();
        import(Vec::new()).unwrap_err();
        // The contents differ, and the checksum at the end tells it.
        let at = gzip.windows(3).position(|three| three == b"abc").unwrap();
        let mut damaged = gzip;
        damaged[at] = b'x';
        import(damaged).unwrap_err();
    }

    /// Bytes of frames that an archive with these members becomes, and the number of members that
    /// were told; a path that ends with `/` is one of a directory.
    fn frames_of(paths: &[&[u8]]) -> (usize, u64) {
        let mut archive = tar::Builder::new(Vec::new());
        for path in paths {
            let mut header = tar::Header::new_ustar();
            let is_directory = path.ends_with(b"/");
            header.set_entry_type(match is_directory {
                true => EntryType::Directory,
                false => EntryType::Regular,
            });
            header.set_size(0);
            header.set_mode(0o755);
            header.set_uid(0);
            header.set_gid(0);
            header.set_mtime(0);
            header.set_cksum();
            archive.append_pax_extensions([("path", *path)]).unwrap();
            archive.append(&header, std::io::empty()).unwrap();
        }
        let archive = std::io::Cursor::new(archive.into_inner().unwrap());
        let report = Report::new(std::path::Path::new("x"));
        let mut bytes = 0;
        let mut deliver = |frame: Vec<u8>| {
            bytes += frame.len();
            Ok(())
        };
        read(Box::new(archive), false, &report, &mut deliver).unwrap();
        (bytes, report.told())
    }

    #[test]
    fn one_path_does_not_make_thousands_of_directories() {
        let deep = |levels: usize| "a/".repeat(levels).into_bytes();
        // Frames with all directories above this path have 64 MiB.
        assert_eq!(frames_of(&[&deep(8192)]), (0, 1));
        let (bytes, told) = frames_of(&[&deep(1000)]);
        assert!(
            told == 0 && (1_000_000..2_000_000).contains(&bytes),
            "{bytes}"
        );
        // Directories with members of their own may be as deep as any.
        let all: Vec<_> = (1..=2500).map(deep).collect();
        let mut paths: Vec<&[u8]> = all.iter().map(|path| &path[..]).collect();
        let file = [&deep(2500)[..], b"f"].concat();
        paths.push(&file);
        assert_eq!(frames_of(&paths).1, 0);
    }
}
