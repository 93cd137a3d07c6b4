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
use crate::import::sparse::{Map, Sparse, Unfit};

/// Longest path of a member above which directories are missing: the longest that programs can name.
const PATH_BYTES_MAX: usize = 4095;
const BLOCK: usize = BLOCK_BYTES as usize;

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
    fn take<R: Read>(
        &mut self,
        mut member: Entry<'_, R>,
        mut records: Records,
    ) -> std::io::Result<()> {
        let kind = member.header().entry_type();
        if kind == EntryType::XGlobalHeader {
            return Ok(());
        }
        let sparse = records.sparse.take();
        let raw = sparse.as_ref().and_then(Sparse::path).map(<[u8]>::to_vec);
        let raw = raw.or_else(|| records.path.clone());
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
        let map = map_of(&mut member, sparse)?;
        let made = map.and_then(|map| Ok((self.body(&member, map.as_ref(), &target)?, map)));
        let ((bits, body), map) = match made {
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
        match (body, map) {
            (ImportBody::File(_), Some(map)) => self.parts(&mut member, &map),
            (ImportBody::File(size_bytes), None) => self.contents(&mut member, size_bytes),
            _ => Ok(()),
        }
    }

    /// The type bits of a member and its contents, or the reason for which no object can be it.
    fn body<'t, R: Read>(
        &self,
        member: &Entry<'_, R>,
        map: Option<&Map>,
        target: &'t [u8],
    ) -> std::result::Result<(u32, ImportBody<'t>), Unfit> {
        use EntryType::{Block, Char, Directory, Fifo, Symlink};
        let is_target = (1..=TARGET_BYTES_MAX).contains(&target.len()) && !target.contains(&0);
        let no_device = |_| "a device without a number";
        match member.header().entry_type() {
            Directory => Ok((0o040_000, ImportBody::Directory)),
            Symlink if !is_target => Err("a symbolic link without a target that it may have"),
            Symlink => Ok((0o120_000, ImportBody::Symlink(target))),
            Fifo => Ok((0o010_000, ImportBody::Special(0))),
            Char | Block if !self.makes_devices => Err("a device: only root may make one"),
            Char => Ok((
                0o020_000,
                ImportBody::Special(device(member).map_err(no_device)?),
            )),
            Block => Ok((
                0o060_000,
                ImportBody::Special(device(member).map_err(no_device)?),
            )),
            kind if is_file(kind) => match map.map_or(member.size(), |map| map.size_bytes) {
                size_bytes if size_bytes > FILE_BYTES_MAX => Err("larger than a file may be"),
                size_bytes => Ok((0o100_000, ImportBody::File(size_bytes))),
            },
            _ => Err("a member of a kind that is not known"),
        }
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

    fn contents(&mut self, member: &mut impl Read, size_bytes: u64) -> std::io::Result<()> {
        let mut scratch = vec![0; usize::try_from(size_bytes.min(1 << 20)).unwrap_or(1 << 20)];
        let mut at = 0;
        while at < size_bytes && !self.frames.is_cut() {
            let len = self.frames.room(size_bytes - at);
            let bytes = &mut scratch[..len];
            member.read_exact(bytes)?;
            self.frames
                .put(&ImportItem::Data { offset: at, bytes }, len);
            at += len as u64;
        }
        Ok(())
    }

    /// Puts the parts of a sparse file, block by block. Between them are holes.
    fn parts(&mut self, member: &mut impl Read, map: &Map) -> std::io::Result<()> {
        let mut block = SparseBlock {
            offset: 0,
            bytes: [0; BLOCK],
        };
        for (offset, bytes) in &map.parts {
            let (mut at, end) = (*offset, offset + bytes);
            while at < end && !self.frames.is_cut() {
                let first = at / BLOCK_BYTES * BLOCK_BYTES;
                if first != block.offset {
                    self.put(&block, map);
                    block.bytes.fill(0);
                    block.offset = first;
                }
                let next = end.min(first + BLOCK_BYTES);
                let [from, to] = [at, next].map(|at| block.place(at));
                member.read_exact(&mut block.bytes[from..to])?;
                at = next;
            }
        }
        self.put(&block, map);
        Ok(())
    }

    /// Puts a block of a sparse file, unless it is a hole.
    fn put(&mut self, block: &SparseBlock, map: &Map) {
        let end = map.size_bytes.min(block.offset + BLOCK_BYTES);
        let bytes = &block.bytes[..block.place(end)];
        if bytes.iter().any(|&byte| byte != 0) {
            let offset = block.offset;
            self.frames
                .put(&ImportItem::Data { offset, bytes }, bytes.len());
        }
    }
}

/// A block of a sparse file, with the parts that lie in it.
struct SparseBlock {
    offset: u64,
    bytes: [u8; BLOCK],
}

impl SparseBlock {
    /// The place in the block of an offset in the file.
    fn place(&self, at: u64) -> usize {
        usize::try_from(at - self.offset).map_or(BLOCK, |at| at.min(BLOCK))
    }
}

fn is_file(kind: EntryType) -> bool {
    matches!(kind, EntryType::Regular | EntryType::Continuous)
}

/// The map of a file that is sparse, or the reason for which it is none.
fn map_of<R: Read>(
    member: &mut Entry<'_, R>,
    sparse: Option<Sparse>,
) -> std::io::Result<std::result::Result<Option<Map>, Unfit>> {
    match sparse {
        Some(sparse) if is_file(member.header().entry_type()) => {
            let map = sparse.map(member.size(), member)?;
            Ok(map.map(Some))
        }
        _ => Ok(Ok(None)),
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

    /// Files that came out of an archive.
    #[derive(Default)]
    struct Came {
        /// Their paths and sizes.
        files: Vec<(Vec<u8>, u64)>,
        /// The first one as a whole, and its bytes that are no holes.
        whole: Vec<u8>,
        put: u64,
    }

    /// The files of an archive that has a member with these records and contents, and one without
    /// records.
    fn sparse_file(records: &[(&str, &[u8])], contents: &[u8]) -> Came {
        let mut archive = tar::Builder::new(Vec::new());
        let records = records.iter().copied();
        archive.append_pax_extensions(records).unwrap();
        for (path, contents) in [("GNUSparseFile.1/a", contents), ("last", b"last")] {
            let mut header = tar::Header::new_ustar();
            header.set_mode(0o644);
            header.set_uid(0);
            header.set_gid(0);
            header.set_mtime(0);
            header.set_size(contents.len() as u64);
            header.set_path(path).unwrap();
            header.set_cksum();
            archive.append(&header, contents).unwrap();
        }
        let archive = std::io::Cursor::new(archive.into_inner().unwrap());
        let report = Report::new(std::path::Path::new("x"));
        let mut came = Came::default();
        let mut deliver = |frame: Vec<u8>| {
            let mut items = ramet_fs::Items::of_frame(&frame);
            while let Some(item) = items.next_item().unwrap() {
                match item {
                    ImportItem::Object {
                        path,
                        body: ImportBody::File(size),
                        ..
                    } => {
                        came.files.push((path.to_vec(), size));
                        if came.files.len() == 1 {
                            came.whole = vec![0; usize::try_from(size).unwrap()];
                        }
                    }
                    ImportItem::Data { offset, bytes } if came.files.len() == 1 => {
                        let at = usize::try_from(offset).unwrap();
                        assert_eq!(at % BLOCK, 0);
                        came.whole[at..at + bytes.len()].copy_from_slice(bytes);
                        came.put += bytes.len() as u64;
                    }
                    _ => {}
                }
            }
            Ok(())
        };
        read(Box::new(archive), false, &report, &mut deliver).unwrap();
        came
    }

    #[test]
    fn parts_of_a_sparse_file_come_to_their_places() {
        const SIZE: u64 = (3 << 20) + 5;
        // A block with three parts, one that goes over its end, a far one, and the last bytes.
        let parts = [
            (0, 3),
            (100, 50),
            (4000, 200),
            (1 << 20, 9000),
            (SIZE - 2, 2),
            (SIZE, 0),
        ];
        let (mut text, mut contents) = (Vec::new(), Vec::new());
        let mut expected = vec![0; usize::try_from(SIZE).unwrap()];
        for (offset, bytes) in parts {
            text.extend([offset.to_string(), bytes.to_string()]);
            for at in offset..offset + bytes {
                let byte = (at % 250) as u8 + 1;
                expected[usize::try_from(at).unwrap()] = byte;
                contents.push(byte);
            }
        }
        let (size, map) = (SIZE.to_string(), text.join(","));
        let named = [("GNU.sparse.name", &b"dir/a"[..]), ("path", b"no name")];
        let first = [named[0], named[1], ("GNU.sparse.size", size.as_bytes())];
        let old = [&first[..], &[("GNU.sparse.map", map.as_bytes())]].concat();
        let mut lines = format!("{}\n{}\n", parts.len(), text.join("\n")).into_bytes();
        lines.resize(512, 0);
        lines.extend_from_slice(&contents);
        let new = [
            ("GNU.sparse.major", &b"1"[..]),
            ("GNU.sparse.realsize", size.as_bytes()),
        ];
        let new = [&named[..], &new].concat();
        for (records, contents) in [(&old, &contents), (&new, &lines)] {
            let Came { files, whole, put } = sparse_file(records, contents);
            let all = [(b"dir/a".to_vec(), SIZE), (b"last".to_vec(), 4)];
            assert_eq!(files, all);
            assert!(whole == expected);
            // Blocks 0, 1, 256 to 258, and the last one, which has 5 bytes.
            assert_eq!(put, 5 * BLOCK_BYTES + 5);
        }
        // A damaged map is a fault of its file alone.
        let damaged = [first[2], ("GNU.sparse.map", b"0,4,2,1")];
        assert_eq!(
            sparse_file(&damaged, b"12345").files,
            [(b"last".to_vec(), 4)]
        );
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
