//! Imports: the published tree is the tree of the stream, in any order and cut anywhere, and an
//! import that ends unpublished leaves nothing.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use common::{make, variable};
use ramet_block::{Device, MemDevice};
use ramet_fs::{
    Attr, Caller, Error, FRAME_BYTES_MAX, FormatOptions, FrameWriter, ITEM_BYTES_MAX, ImportAttr,
    ImportBody, ImportCounts, ImportItem, Ino, Kind, NewInode, OpenOptions, ROOT_INO, Time,
    TreeShape, Volume,
};
use rand::rngs::StdRng;
use rand::seq::SliceRandom;
use rand::{Rng, SeedableRng};

const BLOCK: usize = 4096;
const ACL: &[u8] = b"system.posix_acl_access";
/// A list with a named user: owner 6, user 5 4, group 4, mask 4, others 0.
const LIST: &[u8] = b"\x02\0\0\0\x01\0\x06\0\xff\xff\xff\xff\x02\0\x04\0\x05\0\0\0\x04\0\x04\0\
    \xff\xff\xff\xff\x10\0\x04\0\xff\xff\xff\xff\x20\0\0\0\xff\xff\xff\xff";

/// An object of the source.
#[derive(Clone, Debug)]
struct Object {
    attr: ImportAttr,
    body: Body,
    xattrs: BTreeMap<Vec<u8>, Vec<u8>>,
}

#[derive(Clone, Debug)]
enum Body {
    Directory,
    /// Size, and the parts with data.
    File(u64, Vec<(u64, Vec<u8>)>),
    Symlink(Vec<u8>),
    Fifo,
    /// Another name of the file at a path.
    Link(Vec<u8>),
}

type Tree = Vec<(Vec<u8>, Object)>;

fn attr(mode: u32, rng: &mut StdRng) -> ImportAttr {
    let mut time = || Time {
        secs: rng.random_range(-5_000_000_000..5_000_000_000),
        nanos: rng.random_range(0..1_000_000_000),
    };
    let (atime, mtime) = (time(), time());
    ImportAttr {
        mode: mode | rng.random_range(0..0o10_000),
        uid: rng.random_range(0..5),
        gid: rng.random_range(0..5),
        atime,
        mtime,
        has_names: false,
    }
}

fn file(rng: &mut StdRng) -> Body {
    let size = match rng.random_range(0..10) {
        0 => 0,
        1 => rng.random_range(0..3 << 20),
        _ => rng.random_range(0..20_000),
    };
    let blocks = usize::div_ceil(size, BLOCK);
    let has_holes = rng.random_bool(0.3);
    let mut parts: Vec<(u64, Vec<u8>)> = Vec::new();
    let mut at = 0;
    while at < blocks {
        let end = (at + rng.random_range(1..40)).min(blocks);
        if !(has_holes && rng.random_bool(0.5)) {
            let bytes = (at * BLOCK..(end * BLOCK).min(size)).map(|_| rng.random_range(0..4));
            parts.push(((at * BLOCK) as u64, bytes.collect()));
        }
        at = end;
    }
    Body::File(size as u64, parts)
}

fn random_tree(rng: &mut StdRng) -> Tree {
    let names: [&[u8]; 8] = [b"a", b"a\x01", b"ab", b"b", b"\xff", b"c d", b".x", b"zz"];
    let mut tree: Tree = vec![(Vec::new(), object(Body::Directory, 0o040_000, rng))];
    let mut dirs = vec![Vec::new()];
    let mut files: Vec<Vec<u8>> = Vec::new();
    for _ in 0..rng.random_range(1..120) {
        let mut path = dirs[rng.random_range(0..dirs.len())].clone();
        if !path.is_empty() {
            path.push(b'/');
        }
        path.extend_from_slice(names[rng.random_range(0..names.len())]);
        if tree.iter().any(|(its, _)| *its == path) {
            continue;
        }
        let object = match rng.random_range(0..20) {
            0..6 => {
                dirs.push(path.clone());
                object(Body::Directory, 0o040_000, rng)
            }
            6 => object(Body::Symlink(b"to/there".to_vec()), 0o120_000, rng),
            7 => object(Body::Fifo, 0o010_000, rng),
            8..10 if !files.is_empty() => {
                let first = files[rng.random_range(0..files.len())].clone();
                object(Body::Link(first), 0o100_000, rng)
            }
            _ => {
                files.push(path.clone());
                let body = file(rng);
                object(body, 0o100_000, rng)
            }
        };
        tree.push((path, object));
    }
    tree
}

fn object(body: Body, mode: u32, rng: &mut StdRng) -> Object {
    let mut xattrs = BTreeMap::new();
    let mut attr = attr(mode, rng);
    if matches!(body, Body::Directory | Body::File(..)) {
        for name in ["user.a", "user.b", "trusted.c"] {
            if rng.random_bool(0.1) {
                let len = if rng.random_bool(0.1) { 60_000 } else { 9 };
                xattrs.insert(name.as_bytes().to_vec(), vec![rng.random(); len]);
            }
        }
        if rng.random_bool(0.1) {
            xattrs.insert(ACL.to_vec(), LIST.to_vec());
            attr.mode = attr.mode & !0o777 | 0o640;
        }
    }
    Object { attr, body, xattrs }
}

/// The order of a walk that goes down at each directory. The first name of a file is the file.
fn sort(tree: &mut Tree) {
    let names = |path: &[u8]| -> Vec<Vec<u8>> {
        path.split(|&byte| byte == b'/')
            .map(<[u8]>::to_vec)
            .collect()
    };
    tree.sort_by_key(|(path, _)| names(path));
    while let Some((at, first)) = tree.iter().enumerate().find_map(|(at, (_, object))| {
        let Body::Link(first) = &object.body else {
            return None;
        };
        let first = tree.iter().position(|(path, _)| path == first)?;
        (first > at).then_some((at, first))
    }) {
        let (moved, old) = (tree[at].0.clone(), tree[first].0.clone());
        let link = std::mem::replace(&mut tree[first].1.body, Body::Link(moved.clone()));
        (tree[at].1, tree[first].1) = (tree[first].1.clone(), tree[at].1.clone());
        tree[at].1.body = link;
        tree[first].1.body = Body::Link(moved.clone());
        for (_, object) in tree.iter_mut() {
            if matches!(&object.body, Body::Link(first) if *first == old) {
                object.body = Body::Link(moved.clone());
            }
        }
    }
}

/// Another order in which directories come before their entries, and files before their links.
fn shuffle(tree: &mut Tree, rng: &mut StdRng) {
    let mut left = std::mem::take(tree);
    left.shuffle(rng);
    while !left.is_empty() {
        let is_there = |path: &[u8]| tree.iter().any(|(its, _)| its == path);
        let at = left.iter().position(|(path, object)| {
            let above = path.iter().rposition(|&byte| byte == b'/');
            let parent = above.map_or(&b""[..], |at| &path[..at]);
            let first = match &object.body {
                Body::Link(first) => is_there(first),
                _ => true,
            };
            first && (path.is_empty() || is_there(parent))
        });
        let next = left.remove(at.unwrap());
        tree.push(next);
    }
}

/// The stream of a tree. With `tells_names` a file that has links says so.
fn stream_of(tree: &Tree, tells_names: bool) -> Vec<u8> {
    let (mut stream, mut frame) = (Vec::new(), FrameWriter::new());
    let linked: Vec<&Vec<u8>> = tree
        .iter()
        .filter_map(|(_, object)| match &object.body {
            Body::Link(first) => Some(first),
            _ => None,
        })
        .collect();
    let mut put = |item: &ImportItem<'_>, bytes: usize| {
        if frame.len() + bytes + ITEM_BYTES_MAX > FRAME_BYTES_MAX {
            stream.extend(std::mem::take(&mut frame).finish());
        }
        frame.put(item);
    };
    for (path, object) in tree {
        let mut attr = object.attr;
        attr.has_names = tells_names && linked.contains(&path);
        let body = match &object.body {
            Body::Directory => ImportBody::Directory,
            Body::File(size, _) => ImportBody::File(*size),
            Body::Symlink(target) => ImportBody::Symlink(target),
            Body::Fifo => ImportBody::Special(0),
            Body::Link(first) => {
                put(&ImportItem::Link { path, first }, path.len() + first.len());
                continue;
            }
        };
        put(&ImportItem::Object { path, attr, body }, path.len() + 100);
        for (name, value) in &object.xattrs {
            put(&ImportItem::Xattr { name, value }, name.len() + value.len());
        }
        if let Body::File(_, parts) = &object.body {
            let pieces = parts.iter().flat_map(|(offset, bytes)| {
                let pieces = bytes.chunks(512 << 10).zip((*offset..).step_by(512 << 10));
                pieces.map(|(bytes, offset)| (offset, bytes))
            });
            for (offset, bytes) in pieces {
                put(&ImportItem::Data { offset, bytes }, bytes.len());
            }
        }
    }
    stream.extend(frame.finish());
    stream
}

fn open(device: &Arc<dyn Device>, shape: Option<TreeShape>) -> Arc<Volume> {
    let options = OpenOptions {
        shape,
        ..OpenOptions::default()
    };
    Volume::open(Arc::clone(device), options).unwrap()
}

fn volume() -> (Arc<dyn Device>, Arc<Volume>) {
    let device: Arc<dyn Device> = Arc::new(MemDevice::new(512 << 20));
    Volume::format(&device, &FormatOptions::default()).unwrap();
    let volume = open(&device, None);
    (device, volume)
}

/// Begins an import; answers its stream and its token.
fn begin(volume: &Volume, caller: &Caller) -> (Ino, u64) {
    let new = NewInode {
        uid: caller.uid,
        gid: caller.gid,
        ..NewInode::new(Kind::Regular, 0o600)
    };
    let stream = volume.names().tmpfile(ROOT_INO, &new).unwrap().ino;
    volume.imports().begin(caller, stream, stream.0).unwrap();
    (stream, stream.0)
}

fn write(volume: &Volume, stream: Ino, bytes: &[u8], mut cut: impl FnMut() -> usize) {
    let import = volume.imports().of_stream(stream).unwrap();
    let (mut at, mut rest) = (0, bytes);
    while !rest.is_empty() {
        let (now, later) = rest.split_at(cut().clamp(1, rest.len()));
        import.write(at, now).unwrap();
        at += now.len() as u64;
        rest = later;
    }
}

fn find(volume: &Volume, top: Ino, path: &[u8]) -> Attr {
    let mut found = volume.attributes().getattr(top).unwrap();
    let names = path.split(|&byte| byte == b'/');
    for name in names.filter(|name| !name.is_empty()) {
        found = volume.names().lookup(found.ino, name).unwrap();
    }
    found
}

/// Compares a tree of the volume with the source.
fn compare(volume: &Volume, top: Ino, tree: &Tree) {
    for (path, object) in tree {
        let found = find(volume, top, path);
        if let Body::Link(first) = &object.body {
            assert_eq!(found.ino, find(volume, top, first).ino, "{path:?}");
            continue;
        }
        let want = object.attr;
        assert_eq!(u32::from(found.perm), want.mode & 0o7777, "{path:?}");
        assert_eq!((found.uid, found.gid), (want.uid, want.gid), "{path:?}");
        assert_eq!(
            (found.atime, found.mtime),
            (want.atime, want.mtime),
            "{path:?}"
        );
        let names = volume.attributes().listxattr(found.ino, true).unwrap();
        assert_eq!(names, object.xattrs.keys().cloned().collect::<Vec<_>>());
        for (name, value) in &object.xattrs {
            assert_eq!(
                volume.attributes().getxattr(found.ino, name).unwrap(),
                value
            );
        }
        let subdirs = tree.iter().filter(|(its, object)| {
            let prefix = if path.is_empty() {
                Vec::new()
            } else {
                [path, &b"/"[..]].concat()
            };
            matches!(object.body, Body::Directory)
                && its
                    .strip_prefix(&prefix[..])
                    .is_some_and(|rest| !rest.is_empty() && !rest.contains(&b'/'))
        });
        match &object.body {
            Body::Directory => {
                assert_eq!(found.kind, Kind::Directory);
                assert_eq!(found.nlink as usize, 2 + subdirs.count(), "{path:?}");
            }
            Body::File(size, parts) => {
                assert_eq!((found.kind, found.size_bytes), (Kind::Regular, *size));
                let mut want = vec![0; usize::try_from(*size).unwrap()];
                for (offset, bytes) in parts {
                    let at = usize::try_from(*offset).unwrap();
                    want[at..at + bytes.len()].copy_from_slice(bytes);
                }
                let read = volume.files().read(found.ino, 0, 4 << 20).unwrap();
                assert!(read == want, "contents of {path:?}");
                let blocks: usize = parts
                    .iter()
                    .map(|(_, bytes)| bytes.len().div_ceil(BLOCK))
                    .sum();
                let least = u64::from(*size > 0);
                assert_eq!(found.sectors, (8 * blocks as u64).max(least), "{path:?}");
            }
            Body::Symlink(target) => {
                assert_eq!(found.kind, Kind::Symlink);
                assert_eq!(volume.attributes().readlink(found.ino).unwrap(), target);
            }
            Body::Fifo => assert_eq!(found.kind, Kind::Fifo),
            Body::Link(_) => unreachable!("told above"),
        }
    }
}

fn counts_of(tree: &Tree) -> (u64, u64, u64) {
    let count =
        |is: fn(&Body) -> bool| tree.iter().filter(|(_, object)| is(&object.body)).count() as u64;
    (
        count(|body| matches!(body, Body::File(..))),
        count(|body| matches!(body, Body::Directory)),
        count(|body| matches!(body, Body::Link(_))),
    )
}

fn run(seed: u64, shape: Option<TreeShape>) {
    println!("seed {seed}");
    let mut rng = StdRng::seed_from_u64(seed);
    let device: Arc<dyn Device> = Arc::new(MemDevice::new(512 << 20));
    Volume::format(&device, &FormatOptions::default()).unwrap();
    let volume = open(&device, shape.clone());
    let dir = make(&volume, ROOT_INO, "dir", Kind::Directory).ino;
    let mut trees: Vec<Tree> = Vec::new();
    for number in 0..2 {
        let mut tree = random_tree(&mut rng);
        if rng.random() {
            sort(&mut tree);
        } else {
            shuffle(&mut tree, &mut rng);
        }
        let caller = Caller::root();
        let (stream, token) = begin(&volume, &caller);
        let bytes = stream_of(&tree, rng.random());
        write(&volume, stream, &bytes, || rng.random_range(1..300_000));
        assert!(matches!(volume.names().lookup(dir, b"0"), Err(Error::NotFound)) || number > 0);
        let name = number.to_string();
        let published = volume
            .imports()
            .publish(&caller, token, dir, name.as_bytes());
        let counts = published.unwrap().1;
        assert_eq!(
            (counts.files, counts.directories, counts.links),
            counts_of(&tree)
        );
        assert_eq!(counts.refused_xattrs, 0);
        volume.forget(stream, 1);
        trees.push(tree);
        if rng.random() {
            volume.checkpoint().unwrap();
        }
    }
    let check = |volume: &Volume| {
        let dir = volume.names().lookup(ROOT_INO, b"dir").unwrap().ino;
        for (number, tree) in trees.iter().enumerate() {
            let name = number.to_string();
            let top = volume.names().lookup(dir, name.as_bytes()).unwrap().ino;
            compare(volume, top, tree);
        }
        assert_eq!(volume.controls().check().unwrap(), []);
    };
    check(&volume);
    volume.close().unwrap();
    let volume = open(&device, shape);
    check(&volume);
    // The tree is a clone root as any other.
    let top = find(&volume, ROOT_INO, b"dir/0").ino;
    let clone =
        volume
            .trees()
            .clone_entry(&Caller::root(), top, ROOT_INO, b"copy", Default::default());
    clone.unwrap();
    compare(
        &volume,
        volume.names().lookup(ROOT_INO, b"copy").unwrap().ino,
        &trees[0],
    );
    assert_eq!(volume.controls().check().unwrap(), []);
    volume.close().unwrap();
}

/// Nodes so small that a tree of some files has many.
fn tiny() -> TreeShape {
    TreeShape {
        leaf_bytes: 16 << 10,
        block_bytes: 1 << 10,
        fanout: 4,
        buffer_bytes: 32 << 10,
        memory_bytes: 64 << 10,
        ingest_bytes: 16 << 10,
        ..TreeShape::default()
    }
}

#[test]
fn published_tree_is_that_of_the_stream() {
    if let Some(seed) = variable("RAMET_SEED") {
        run(seed, None);
        return run(seed, Some(tiny()));
    }
    for seed in 0..variable("RAMET_CASES").unwrap_or(12) {
        run(seed, None);
        run(seed, Some(tiny()));
    }
}

/// Maps of holes lie among blocks that are settled beside the stream.
#[test]
fn holes_stay_where_their_blocks_are_settled_beside_the_stream() {
    let mut rng = StdRng::seed_from_u64(3);
    let mut tree = vec![(Vec::new(), object(Body::Directory, 0o040_000, &mut rng))];
    let mut add = |path: String, size: u64, parts: Vec<(u64, Vec<u8>)>| {
        let mut file = object(Body::File(size, parts), 0o100_000, &mut rng);
        file.xattrs.clear();
        tree.push((path.into_bytes(), file));
    };
    for group in 0..6 {
        for number in 0..30 {
            let bytes = vec![number; 50_000];
            add(format!("{group}a{number:02}"), 50_000, vec![(0, bytes)]);
        }
        let (front, back) = (vec![8; 512 << 10], vec![9; 3 << 20]);
        let size = 4 << 20;
        let parts = vec![(0, front), (size - back.len() as u64, back)];
        add(format!("{group}b"), size, parts);
    }
    let (_, volume) = volume();
    let caller = Caller::root();
    let (stream, token) = begin(&volume, &caller);
    write(&volume, stream, &stream_of(&tree, false), || usize::MAX);
    let published = volume.imports().publish(&caller, token, ROOT_INO, b"t");
    published.unwrap();
    volume.forget(stream, 1);
    let top = volume.names().lookup(ROOT_INO, b"t").unwrap().ino;
    compare(&volume, top, &tree);
    assert_eq!(volume.controls().check().unwrap(), []);
}

fn small_tree() -> Vec<u8> {
    let mut rng = StdRng::seed_from_u64(1);
    let mut tree = vec![(Vec::new(), object(Body::Directory, 0o040_000, &mut rng))];
    for number in 0..120 {
        let path = format!("f{number:03}").into_bytes();
        let parts = vec![(0, vec![7; 60_000])];
        let body = Body::File(60_000, parts);
        tree.push((path, object(body, 0o100_000, &mut rng)));
    }
    stream_of(&tree, false)
}

#[test]
fn import_that_ends_before_it_is_published_leaves_nothing() {
    let (device, volume) = volume();
    let caller = Caller::root();
    // The number of the stream's directory is given, and stays.
    volume.forget(begin(&volume, &caller).0, 1);
    volume.checkpoint().unwrap();
    let keys = |volume: &Volume| volume.tree().scan(b"", None).count();
    let before = keys(&volume);
    let (stream, token) = begin(&volume, &caller);
    write(&volume, stream, &small_tree(), || usize::MAX);
    // Blocks are settled beside the stream.
    let deadline = Instant::now() + Duration::from_secs(60);
    while keys(&volume) <= before + 1000 {
        assert!(Instant::now() < deadline, "{} keys", keys(&volume));
        std::thread::yield_now();
    }
    volume.forget(stream, 1);
    assert!(volume.imports().of_stream(stream).is_none());
    let published = volume.imports().publish(&caller, token, ROOT_INO, b"t");
    assert!(matches!(published, Err(Error::NotFound)));
    assert_eq!(keys(&volume), before);
    // A crash instead of an end: the next opening erases the tree.
    let (stream, _) = begin(&volume, &caller);
    write(&volume, stream, &small_tree(), || usize::MAX);
    volume.sync_all().unwrap();
    drop(volume);
    let volume = open(&device, None);
    assert_eq!(keys(&volume), before);
    assert_eq!(volume.controls().check().unwrap(), []);
}

#[test]
fn only_its_user_publishes_an_import_and_only_to_a_free_name() {
    let (_, volume) = volume();
    let (owner, other) = (Caller::user(7, 7), Caller::user(8, 8));
    let new = NewInode {
        uid: 7,
        ..NewInode::new(Kind::Directory, 0o755)
    };
    let dir = volume.names().create(ROOT_INO, b"d", &new).unwrap().ino;
    make(&volume, dir, "taken", Kind::Regular);
    let (stream, token) = begin(&volume, &owner);
    let publish = |caller, dir, name: &[u8]| {
        let done = volume.imports().publish(caller, token, dir, name);
        done.map(|(_, counts)| counts)
    };
    let begun = volume.imports().begin(&other, stream, 1);
    assert!(matches!(begun, Err(Error::NotPermitted)));
    assert!(matches!(
        volume.imports().begin(&owner, dir, 1),
        Err(Error::IsDirectory)
    ));
    let named = volume.names().lookup(dir, b"taken").unwrap().ino;
    assert!(matches!(
        volume.imports().begin(&owner, named, 1),
        Err(Error::Invalid(_))
    ));
    assert!(matches!(publish(&other, dir, b"t"), Err(Error::NotFound)));
    assert!(matches!(
        publish(&owner, ROOT_INO, b"t"),
        Err(Error::Access)
    ));
    assert!(matches!(publish(&owner, dir, b"taken"), Err(Error::Exists)));
    let empty = ImportCounts {
        directories: 1,
        ..ImportCounts::default()
    };
    assert_eq!(publish(&owner, dir, b"t").unwrap(), empty);
    assert!(matches!(publish(&owner, dir, b"u"), Err(Error::Stale)));
    let top = volume.names().lookup(dir, b"t").unwrap();
    assert_eq!((top.uid, top.nlink), (7, 2));
    assert_eq!(volume.controls().check().unwrap(), []);
}

#[test]
fn user_without_privileges_gets_objects_of_its_own() {
    let (_, volume) = volume();
    let caller = Caller {
        groups: vec![5],
        ..Caller::user(7, 7)
    };
    let new = NewInode {
        uid: 7,
        ..NewInode::new(Kind::Directory, 0o755)
    };
    let dir = volume.names().create(ROOT_INO, b"d", &new).unwrap().ino;
    let (stream, token) = begin(&volume, &caller);
    let mut frame = FrameWriter::new();
    for (path, uid, gid) in [(&b"kept"[..], 7, 5), (b"theirs", 0, 0), (b"group", 0, 5)] {
        let attr = ImportAttr {
            mode: 0o106_755,
            uid,
            gid,
            ..ImportAttr::default()
        };
        let body = ImportBody::File(0);
        frame.put(&ImportItem::Object { path, attr, body });
        for name in [
            &b"trusted.a"[..],
            b"security.capability",
            b"user.a",
            b"nonsense",
        ] {
            let value = b"v";
            frame.put(&ImportItem::Xattr { name, value });
        }
    }
    write(&volume, stream, &frame.finish(), || usize::MAX);
    let published = volume.imports().publish(&caller, token, dir, b"t");
    assert_eq!(published.unwrap().1.refused_xattrs, 9);
    let top = volume.names().lookup(dir, b"t").unwrap().ino;
    let found = |name: &[u8]| {
        let found = volume.names().lookup(top, name).unwrap();
        (found.uid, found.gid, found.perm)
    };
    assert_eq!(found(b"kept"), (7, 5, 0o6755));
    assert_eq!(found(b"theirs"), (7, 7, 0o755));
    assert_eq!(found(b"group"), (7, 5, 0o755));
    let (stream, _) = begin(&volume, &caller);
    let mut frame = FrameWriter::new();
    let attr = ImportAttr {
        mode: 0o020_644,
        ..ImportAttr::default()
    };
    let (path, body) = (&b"device"[..], ImportBody::Special(5));
    frame.put(&ImportItem::Object { path, attr, body });
    let import = volume.imports().of_stream(stream).unwrap();
    assert!(matches!(
        import.write(0, &frame.finish()),
        Err(Error::NotPermitted)
    ));
    assert_eq!(volume.controls().check().unwrap(), []);
}

/// Items that no tree has, each behind a directory `d` and a file `f` of 5000 bytes.
fn misplaced() -> Vec<(Vec<ImportItem<'static>>, &'static str)> {
    let attr = |mode| ImportAttr {
        mode,
        ..ImportAttr::default()
    };
    let file = |path, size| ImportItem::Object {
        path,
        attr: attr(0o100_644),
        body: ImportBody::File(size),
    };
    let data = |offset, bytes| ImportItem::Data { offset, bytes };
    let link = |path, first| ImportItem::Link { path, first };
    let directory = |path| ImportItem::Object {
        path,
        attr: attr(0o040_755),
        body: ImportBody::Directory,
    };
    vec![
        (vec![file(b"f", 1)], "a second file"),
        (vec![directory(b"f")], "a directory over a file"),
        (vec![file(b"d", 1)], "a file over a directory"),
        (vec![file(b"f/x", 1)], "below a file"),
        (vec![file(b"none/x", 1)], "below nothing"),
        (vec![file(b"", 1)], "the top"),
        (vec![file(b"d/..", 1)], "a name of no entry"),
        (vec![file(b"d//x", 1)], "an empty name"),
        (vec![file(b"a\0b", 1)], "a name with a NUL"),
        (
            vec![directory(b"d/e"), file(b"d\0\x02e/x", 1)],
            "a directory with a NUL",
        ),
        (vec![link(b"x", b"d\0\x02f")], "a link to a name with a NUL"),
        (vec![file(b"x", 1 << 63)], "too long"),
        (vec![data(0, b"abc")], "a part of a block"),
        (vec![data(1, &[1; 4096])], "not at a block"),
        (vec![data(4096, &[1; 905])], "behind the end"),
        (vec![data(0, &[1; 4096]), data(0, &[1; 4096])], "twice"),
        (vec![data(0, b"")], "no bytes"),
        (vec![directory(b"e"), data(0, &[1; 4096])], "of a directory"),
        (vec![link(b"x", b"none")], "a link to nothing"),
        (vec![link(b"x", b"d")], "a link to a directory"),
        (vec![link(b"d", b"f")], "a link over a directory"),
        (
            vec![ImportItem::Object {
                path: b"x",
                attr: attr(0o040_644),
                body: ImportBody::File(0),
            }],
            "two kinds",
        ),
        (
            vec![ImportItem::Object {
                path: b"x",
                attr: attr(0o120_777),
                body: ImportBody::Symlink(b""),
            }],
            "no target",
        ),
    ]
}

#[test]
fn items_out_of_place_end_an_import_and_leave_nothing() {
    let (_, volume) = volume();
    let caller = Caller::root();
    let mut all = misplaced();
    all.push((Vec::new(), "nothing wrong"));
    for (items, why) in &all {
        let (stream, token) = begin(&volume, &caller);
        let mut frame = FrameWriter::new();
        let attr = |mode| ImportAttr {
            mode,
            ..ImportAttr::default()
        };
        for (path, mode, body) in [
            (&b"d"[..], 0o040_755, ImportBody::Directory),
            (b"f", 0o100_644, ImportBody::File(5000)),
        ] {
            let attr = attr(mode);
            frame.put(&ImportItem::Object { path, attr, body });
        }
        items.iter().for_each(|item| frame.put(item));
        let import = volume.imports().of_stream(stream).unwrap();
        let written = import.write(0, &frame.finish());
        assert_eq!(written.is_ok(), items.is_empty(), "{why}: {written:?}");
        let published = volume.imports().publish(&caller, token, ROOT_INO, b"t");
        assert_eq!(published.is_ok(), items.is_empty(), "{why}");
        volume.forget(stream, 1);
        assert_eq!(volume.controls().check().unwrap(), [], "{why}");
    }
    let (stream, token) = begin(&volume, &caller);
    let import = volume.imports().of_stream(stream).unwrap();
    assert!(matches!(import.write(8, b"x"), Err(Error::Invalid(_))));
    import.write(0, &small_tree()[..100]).unwrap();
    let published = volume.imports().publish(&caller, token, ROOT_INO, b"u");
    assert!(matches!(published, Err(Error::Invalid(_))));
    let (stream, _) = begin(&volume, &caller);
    let import = volume.imports().of_stream(stream).unwrap();
    assert!(matches!(
        import.write(0, &[0xff; 64]),
        Err(Error::Invalid(_))
    ));
    volume.forget_all();
    assert_eq!(volume.controls().check().unwrap(), []);
}

/// Streams with changed bytes are refused or make another tree, and break nothing.
#[test]
fn changed_streams_break_nothing() {
    let (_, volume) = volume();
    let caller = Caller::root();
    let seed = variable("RAMET_SEED").unwrap_or(28);
    println!("seed {seed}");
    let mut rng = StdRng::seed_from_u64(seed);
    let (mut refused, mut taken) = (0, 0);
    for round in 0..variable("RAMET_CASES").unwrap_or(120) {
        let mut tree = random_tree(&mut rng);
        sort(&mut tree);
        // Most bytes are then those of paths, lengths and attributes.
        for (_, object) in &mut tree {
            if let Body::File(_, parts) = &mut object.body {
                parts.clear();
            }
            object.xattrs.retain(|_, value| value.len() < 100);
        }
        let mut bytes = stream_of(&tree, rng.random());
        for _ in 0..rng.random_range(1..4) {
            let at = rng.random_range(0..bytes.len());
            match rng.random_range(0..3) {
                0 => bytes[at] = rng.random(),
                1 => bytes[at] ^= 1 << rng.random_range(0..8),
                _ => bytes[at] = [0, 1, b'/', 0x7f, 0x80, 0xff][rng.random_range(0..6)],
            }
        }
        let (stream, token) = begin(&volume, &caller);
        let import = volume.imports().of_stream(stream).unwrap();
        let name = format!("t{round}");
        let published = import.write(0, &bytes).and_then(|()| {
            volume
                .imports()
                .publish(&caller, token, ROOT_INO, name.as_bytes())
        });
        match published {
            Ok(_) => {
                taken += 1;
                let removed = volume
                    .trees()
                    .remove_tree(&caller, ROOT_INO, name.as_bytes());
                removed.unwrap();
            }
            Err(_) => refused += 1,
        }
        volume.forget(stream, 1);
        if round % 50 == 0 {
            assert_eq!(volume.controls().check().unwrap(), [], "round {round}");
        }
    }
    assert!(
        refused > 20 && taken > 20,
        "{refused} refused, {taken} taken"
    );
    assert_eq!(volume.controls().check().unwrap(), []);
}
