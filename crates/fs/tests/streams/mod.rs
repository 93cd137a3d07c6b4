//! Streams in memory, and trees as readers see them.
#![allow(dead_code, reason = "each test takes a part")]

use std::collections::BTreeMap;
use std::sync::Arc;

use ramet_block::{Device, MemDevice};
use ramet_fs::{
    AccessTime, Caller, ControlState, FileFlags, FormatOptions, InVolume, Ino, Kind, OpenOptions,
    ROOT_INO, ReceiveCounts, ReceiveError, Receiver, Replace, SECTION_HEAD_BYTES,
    STREAM_HEAD_BYTES, SectionHead, Sections, SendPage, SendRequest, StreamId, Time, Volume,
    decode_stream_head, encode_stream_head,
};

/// A tree to be sent.
#[derive(Clone)]
pub struct Sent {
    pub name: String,
    pub dir: Ino,
    pub at: Option<(String, Vec<u8>)>,
    pub base: Option<(String, Vec<u8>)>,
}

/// A directory of today.
pub fn sent(name: &str, dir: Ino) -> Sent {
    Sent {
        name: name.to_owned(),
        dir,
        at: None,
        base: None,
    }
}

/// The same tree, made of the directory `d` of a snapshot.
pub fn base(sent: Sent, snapshot: &str) -> Sent {
    Sent {
        base: Some((snapshot.to_owned(), b"d".to_vec())),
        ..sent
    }
}

#[derive(Clone, Debug)]
pub struct Stream {
    pub bytes: Vec<u8>,
}

pub type Section<'a> = (&'a [u8; SECTION_HEAD_BYTES], &'a [u8]);

impl Stream {
    pub fn id(&self) -> StreamId {
        decode_stream_head(self.bytes.first_chunk().unwrap()).unwrap()
    }

    pub fn sections(&self) -> Vec<Section<'_>> {
        let mut rest = &self.bytes[STREAM_HEAD_BYTES..];
        let mut all = Vec::new();
        while let Some((head, behind)) = rest.split_first_chunk() {
            let len = SectionHead::decode(head).unwrap().stored_bytes;
            all.push((head, &behind[..len]));
            rest = &behind[len..];
        }
        all
    }
}

/// The stream of these trees.
pub fn send(volume: &Volume, roots: &[Sent]) -> Stream {
    try_send(volume, roots).unwrap()
}

pub fn try_send(volume: &Volume, roots: &[Sent]) -> ramet_fs::Result<Stream> {
    let state = ControlState::default();
    let (controls, session) = (volume.controls(), 7);
    let ask =
        |dir, request: &SendRequest| controls.send(&state, volume.snapshots(), (dir, request));
    for (number, root) in roots.iter().enumerate() {
        let request = SendRequest::Add {
            root: 0,
            session,
            begins: number == 0,
            name: root.name.clone().into_bytes(),
            at: root.at.clone(),
            base: root.base.clone(),
        };
        ask(root.dir, &request)?;
    }
    let (mut bytes, mut items, mut sections) = (Vec::new(), Vec::new(), None);
    loop {
        let page = SendPage::decode(&ask(ROOT_INO, &SendRequest::Next { session })?)?;
        let sections = sections.get_or_insert_with(|| {
            bytes.extend(encode_stream_head(page.stream));
            Sections::of(page.stream)
        });
        items.extend(page.items);
        if page.ends_section {
            bytes.extend(sections.encode(&items, page.ends_stream));
            items.clear();
            if page.ends_stream {
                assert!(state.is_idle());
                return Ok(Stream { bytes });
            }
        }
    }
}

/// The directories that a stream replaces, as `ramet receive` has it without --force.
pub fn replace(replaces: bool) -> Replace {
    match replaces {
        true => Replace::Known,
        false => Replace::Nothing,
    }
}

pub fn receiver(to: &Arc<Volume>, stream: &Stream, replaces: bool) -> Receiver<InVolume> {
    let place = InVolume::new(Arc::clone(to), Caller::root(), ROOT_INO);
    Receiver::new(place, stream.id(), replace(replaces))
}

pub fn receive(
    to: &Arc<Volume>,
    stream: &Stream,
    replaces: bool,
) -> Result<ReceiveCounts, ReceiveError> {
    receive_as(to, (ROOT_INO, Caller::root()), stream, replaces)
}

pub fn receive_as(
    to: &Arc<Volume>,
    (dir, caller): (Ino, Caller),
    stream: &Stream,
    replaces: bool,
) -> Result<ReceiveCounts, ReceiveError> {
    let truncated = ReceiveError::Truncated(0);
    let Some((head, mut rest)) = stream.bytes.split_first_chunk() else {
        return Err(truncated);
    };
    let place = InVolume::new(Arc::clone(to), caller, dir);
    let mut receiver = Receiver::new(place, decode_stream_head(head)?, replace(replaces));
    let take_all = || {
        while let Some((head, behind)) = rest.split_first_chunk() {
            let len = SectionHead::decode(head)?.stored_bytes;
            let Some((stored, next)) = behind.split_at_checked(len) else {
                return Err(truncated);
            };
            receiver.take(head, stored)?;
            rest = next;
        }
        receiver.finish()
    };
    let taken = take_all();
    if let Err(error) = &taken {
        receiver.give_up(error, true)?;
    }
    taken
}

/// An object as a reader sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Seen {
    pub kind: Kind,
    pub perm: u16,
    pub owner: (u32, u32),
    pub rdev: u32,
    pub mtime: Time,
    pub content: Vec<u8>,
    /// Bytes of data, without holes.
    pub sectors: u64,
    pub flags: Option<FileFlags>,
    pub xattrs: BTreeMap<Vec<u8>, Vec<u8>>,
    /// The first path of the object, if it is a file.
    pub first: Option<String>,
}

pub type Tree = BTreeMap<String, Seen>;

/// The tree of a directory, with its top as the empty path.
pub fn tree(volume: &Volume, top: Ino) -> Tree {
    let mut all = Tree::new();
    let mut firsts = BTreeMap::new();
    let mut todo = vec![(String::new(), top)];
    while let Some((path, ino)) = todo.pop() {
        let attributes = volume.attributes();
        let attr = attributes.getattr(ino).unwrap();
        let content = match attr.kind {
            Kind::Regular => volume.files().read(ino, 0, 16 << 20).unwrap(),
            Kind::Symlink => attributes.readlink(ino).unwrap().to_vec(),
            _ => Vec::new(),
        };
        let is_dir = attr.kind == Kind::Directory;
        let names = attributes.listxattr(ino, true).unwrap();
        let value = |name: &[u8]| attributes.getxattr(ino, name).unwrap().to_vec();
        let has_flags = is_dir || attr.kind == Kind::Regular;
        let seen = Seen {
            kind: attr.kind,
            perm: attr.perm,
            owner: (attr.uid, attr.gid),
            rdev: attr.rdev,
            mtime: attr.mtime,
            content,
            sectors: if is_dir { 0 } else { attr.sectors },
            flags: has_flags.then(|| attributes.flags(ino).unwrap()),
            xattrs: names.iter().map(|n| (n.to_vec(), value(n))).collect(),
            first: None,
        };
        if is_dir {
            for name in super::common::names(volume, ino) {
                let below = volume.names().lookup(ino, &name).unwrap().ino;
                let name = String::from_utf8(name).unwrap();
                todo.push((format!("{path}/{name}"), below));
            }
        } else {
            let first: &mut String = firsts.entry(ino).or_insert_with(|| path.clone());
            *first = first.clone().min(path.clone());
        }
        all.insert(path.clone(), seen);
        if !is_dir {
            all.get_mut(&path).unwrap().first = Some(ino.0.to_string());
        }
    }
    let firsts: BTreeMap<String, String> = firsts
        .into_iter()
        .map(|(ino, path)| (ino.0.to_string(), path))
        .collect();
    for seen in all.values_mut() {
        seen.first = seen.first.take().map(|ino| firsts[&ino].clone());
    }
    all
}

/// A new volume of 64 MiB on which reading changes no time.
pub fn volume_without_access_times() -> Arc<Volume> {
    let device: Arc<dyn Device> = Arc::new(MemDevice::new(64 << 20));
    Volume::format(&device, &FormatOptions::default()).unwrap();
    let options = OpenOptions {
        access_time: AccessTime::Never,
        dir_access_time: AccessTime::Never,
        ..OpenOptions::default()
    };
    Volume::open(device, options).unwrap()
}

/// The times of the last access of all objects in the tree of a directory.
pub fn access_times(volume: &Volume, top: Ino) -> BTreeMap<String, Time> {
    let (mut all, mut todo) = (BTreeMap::new(), vec![(String::new(), top)]);
    while let Some((path, ino)) = todo.pop() {
        let attr = volume.attributes().getattr(ino).unwrap();
        if attr.kind == Kind::Directory {
            for name in super::common::names(volume, ino) {
                let below = volume.names().lookup(ino, &name).unwrap().ino;
                let name = String::from_utf8(name).unwrap();
                todo.push((format!("{path}/{name}"), below));
            }
        }
        all.insert(path, attr.atime);
    }
    all
}
