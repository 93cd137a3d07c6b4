//! Golden bytes of nodes, forged violations of T1 to T7, and decoders on damaged bytes.

use std::sync::Arc;

use bytes::Bytes;
use ramet_block::encoding::{Reader, Writer};
use ramet_block::{Codec, checksum};
use ramet_nodetable::NodeId;

use crate::check::verify::check_skeleton;
use crate::key::range::KeyRange;
use crate::key::translation::{Rest, Translation};
use crate::node::buffer::Buffer;
use crate::node::filter;
use crate::node::filter::Filter;
use crate::node::handle::{Handle, Kind};
use crate::node::message::{Point, RangeMsg, Target};
use crate::node::packed::PackedBuilder;
use crate::node::run_builder::{RunImage, segment_image};
use crate::node::run_index::{RunIndex, index_len};
use crate::node::skeleton::{Child, Edge, SegRef, Skeleton};
use crate::node::wire::{put_translation, take_translation};
use crate::store::store::Store;
use crate::testing::store;

fn key(text: &'static str) -> Bytes {
    Bytes::from_static(text.as_bytes())
}

fn range(lo: &'static str, hi: &'static str) -> KeyRange {
    KeyRange::new(key(lo), Some(key(hi)))
}

fn sample_run(store: &Store) -> Buffer {
    let mut run = Buffer::default();
    let node = store
        .handles
        .recorded(NodeId(7), Kind::Leaf, 0)
        .expect("no other kind is known");
    run.add_range(range("b", "c"), RangeMsg::Null);
    run.add_range(
        range("dx", "dy"),
        RangeMsg::Goto(Target {
            translation: Translation::replacing(1, key("s")),
            node,
        }),
    );
    run.add_point(key("aa"), Point::Put(key("v")));
    run.add_point(key("ab"), Point::Delete);
    run.add_point(key("bz"), Point::Put(key("w")));
    for (offset, bytes) in [(3, "pq"), (7, "rs"), (12, "t")] {
        run.add_point(key("z"), Point::patch(offset, key(bytes)));
    }
    run
}

fn sample_image(store: &Store) -> RunImage {
    segment_image(&sample_run(store), Codec::Raw, 4096)
}

fn sample_skeleton(store: &Store) -> Skeleton {
    let child = |id, strip, prepend| Child {
        translation: Translation::replacing(strip, key(prepend)),
        node: store
            .handles
            .recorded(NodeId(id), Kind::Leaf, 0)
            .expect("no other kind is known"),
        live_bytes: 300,
    };
    let mut node = Skeleton {
        height: 1,
        hi: Some(key("q")),
        edges: vec![
            Edge {
                lo: key("a"),
                watermark: 0,
                child: Some(child(3, 0, "")),
            },
            Edge {
                lo: key("cc"),
                watermark: 3,
                child: None,
            },
            Edge {
                lo: key("cd"),
                watermark: 3,
                child: None,
            },
            Edge {
                lo: key("pa"),
                watermark: 2,
                child: Some(child(4, 1, "t")),
            },
        ],
        segs: Vec::new(),
        next_ord: 1,
    };
    let run = store
        .handles
        .recorded(NodeId(5), Kind::Segment, 0)
        .expect("no other kind is known");
    node.segs.push(SegRef {
        run,
        ord: 1,
        clip: range("a", "q"),
        translation: Translation::identity(),
        goto_height: 0,
        bytes: 40,
    });
    node.next_ord = 2;
    node
}

fn decode(store: &Store, bytes: &[u8]) -> Option<Skeleton> {
    let mut node_of = |id, height| store.handles.recorded_child(id, height);
    let mut run_of = |id| store.handles.recorded(NodeId(id), Kind::Segment, 0);
    Skeleton::decode(bytes, &mut node_of, &mut run_of).ok()
}

fn decode_front(store: &Store, front: &[u8], used: usize) -> Option<RunIndex> {
    let mut node_of = |id, height| store.handles.recorded(NodeId(id), Kind::Leaf, height);
    RunIndex::decode(
        front,
        Kind::Segment,
        u32::try_from(used).expect("small"),
        &mut node_of,
    )
    .ok()
}

#[test]
fn skeleton_has_its_golden_bytes() {
    let store = store();
    let bytes = sample_skeleton(&store).encode();
    let golden: &[&[u8]] = &[
        b"RSKL\x01\0\0\0",
        b"\x04\0\0\0\x01\0\0\0",
        b"\x02\0\0\0\0\0\0\0",
        b"\x01\0\x01q",
        b"\0\x01a\x00\x01\x00\x00\x06\x00\xac\x02",
        b"\0\x02cc\x03\x00",
        b"\x01\x01d\x03\x00",
        b"\0\x02pa\x02\x01\x03\x01t\x02\x00\xac\x02",
        b"\x02\x01\0\x01a\x01\0\x01q\x00\x00\x00\x28",
    ];
    assert_eq!(bytes, golden.concat());
    let again = decode(&store, &bytes).expect("an encoded skeleton decodes");
    assert_eq!(again.encode(), bytes);
}

#[test]
fn translations_have_their_golden_bytes() {
    let (_, numbers) = Translation::of_numbers(&key("xy"), 7..9, (key("ab"), 263), 8);
    let nothing = Translation {
        rest: Rest::Nothing,
        ..Translation::identity()
    };
    let golden: [(Translation, &[u8]); 3] = [
        (Translation::replacing(1, key("t")), b"\x03\x01t"),
        (numbers, b"\x07\x02ab\x08\x08\x80\x02"),
        (nothing, b"\x02\0"),
    ];
    for (translation, bytes) in golden {
        let mut w = Writer::new();
        put_translation(&mut w, &translation);
        assert_eq!(w.into_vec(), bytes);
        let decoded = |bytes: &[u8]| take_translation(&mut Reader::new(bytes));
        assert_eq!(decoded(bytes), Ok(translation));
        for cut in 0..bytes.len() {
            assert!(decoded(&bytes[..cut]).is_err(), "{bytes:?} cut at {cut}");
        }
    }
    // A number of nine bytes, a sum that has more bytes than its place, nothing with a prefix.
    for bad in [
        &b"\x07\0\x09\x08\0"[..],
        b"\x07\0\x01\x01\x80\x02",
        b"\x02\x01a",
        b"\x05\0",
    ] {
        assert!(take_translation(&mut Reader::new(bad)).is_err(), "{bad:?}");
    }
}

#[test]
fn run_has_its_golden_bytes() {
    let store = store();
    let image = sample_image(&store);
    let block: &[&[u8]] = &[
        b"\x00",
        b"\x02\x04aav",
        b"\x02\x01ab",
        b"\x02\x04bzw",
        b"\x01\x0ez\x06\x02pq\x05rs\x06\x01t",
        b"\x01\x00\x06\x00\x0a\x00\x0f\x00",
    ];
    let block = block.concat();
    let filter = Filter::of(&[b"aa", b"ab", b"bz", b"z\0"].map(|key| match key {
        b"z\0" => filter::hash(b"z"),
        key => filter::hash(key),
    }))
    .encode();
    assert_eq!(filter.len(), 40);
    let front: &[&[u8]] = &[
        b"RRUN\x02\0\0\0",
        b"\x82\0\0\0\xa6\0\0\0\x01\0\0\0\x02\0\0\0\x28\0\0\0\0\0\0\0",
        b"\x02aa\0\0\0\0\x24\0\0\0\x24\0\0\0\x04\0\0\0\x01\0\0\0\x00",
        &checksum(&block).to_le_bytes(),
        b"\x01b\x01\x01c\x00",
        b"\x02dx\x01\x02dy\x01\x03\x01s\x07\0\0\0\0\0\0\0\x00",
        &filter,
    ];
    let front = front.concat();
    assert_eq!(image.bytes, [&front[..], &block[..]].concat());
    assert_eq!(image.checksum, checksum(&front));
    let index =
        decode_front(&store, &front, image.bytes.len()).expect("an encoded front part decodes");
    let stored = Bytes::copy_from_slice(&image.bytes[front.len()..]);
    let block = index.blocks[0]
        .decode(Kind::Segment, stored.clone(), None, 0)
        .expect("decodes");
    assert_eq!(block.len(), 4);
    assert!(index.filter.may_hold(filter::hash(b"bz")));
    assert!(
        index.blocks[0].decode(Kind::Leaf, stored, None, 0).is_err(),
        "T5: a leaf holds puts only"
    );
}

/// A key that could share a byte more, or that shares more than there is, is no encoding.
#[test]
fn skeletons_have_one_encoding() {
    let store = store();
    let bytes = sample_skeleton(&store).encode();
    let at = |needle: &[u8]| {
        let found = bytes.windows(needle.len()).position(|part| part == needle);
        found.expect("the bytes are pinned")
    };
    let cd = at(b"\x01\x01d");
    for forged in [&b"\0\x02cd"[..], b"\x03\x01d"] {
        let forged = [&bytes[..cd], forged, &bytes[cd + 3..]].concat();
        assert!(decode(&store, &forged).is_none());
    }
    let same = [&bytes[..cd], b"\x01\x01d", &bytes[cd + 3..]].concat();
    assert!(decode(&store, &same).is_some());
}

/// Every byte of every structure is set to a few other values: decoding gives an error or a sound
/// structure, never a panic.
#[test]
fn damaged_nodes_do_not_panic() {
    let store = store();
    let skeleton = sample_skeleton(&store).encode();
    let image = sample_image(&store);
    let front_len = index_len(
        &image.bytes,
        u32::try_from(image.bytes.len()).expect("small"),
    )
    .expect("sound");
    let mut refused = 0;
    for value in [0u8, 1, 2, 0x7f, 0x80, 0xff] {
        for at in 0..skeleton.len() {
            let mut bytes = skeleton.clone();
            bytes[at] = value;
            match decode(&store, &bytes) {
                None => refused += 1,
                Some(node) => assert!(
                    check_skeleton(&handle(&store, &node), &node).is_empty(),
                    "byte {at} = {value}"
                ),
            }
        }
        for at in 0..front_len {
            let mut front = image.bytes[..front_len].to_vec();
            front[at] = value;
            refused += usize::from(decode_front(&store, &front, image.bytes.len()).is_none());
        }
    }
    for cut in 0..skeleton.len() {
        assert!(decode(&store, &skeleton[..cut]).is_none(), "cut at {cut}");
    }
    assert!(refused > 100, "only {refused} damaged nodes were refused");
}

fn handle(store: &Store, node: &Skeleton) -> Arc<Handle> {
    store.handles.new_skeleton(node.clone())
}

#[test]
fn forged_skeletons_are_found_by_number() {
    let store = store();
    let forge = |number: &str, change: &dyn Fn(&mut Skeleton)| {
        let mut node = sample_skeleton(&store);
        assert!(
            check_skeleton(&handle(&store, &node), &node).is_empty(),
            "the sample is sound"
        );
        change(&mut node);
        let found = check_skeleton(&handle(&store, &node), &node);
        assert!(
            found.iter().any(|v| v.starts_with(number)),
            "{number}: {found:?}"
        );
        assert!(
            decode(&store, &node.encode()).is_none(),
            "{number}: the decoder refuses it too"
        );
    };
    forge("T1", &|n| n.edges.swap(0, 1));
    forge("T2", &|n| {
        n.edges[0]
            .child
            .as_mut()
            .expect("has one")
            .translation
            .strip = 1
    });
    forge("T2", &|n| n.segs[0].translation.strip = 1);
    forge("T3", &|n| {
        n.edges[0].child.as_mut().expect("has one").node = store
            .handles
            .recorded(NodeId(99), Kind::Skeleton, 1)
            .expect("no other kind is known")
    });
    forge("T4", &|n| n.next_ord = 1);
}

/// A segment has the same bytes whether it was packed before or not.
#[test]
fn a_packed_run_has_the_image_of_its_map() {
    let mut run = Buffer::default();
    for n in 0..2000u32 {
        let point = match n % 7 {
            0 => Point::Delete,
            1 => Point::patch(n % 50, Bytes::from(vec![3; 9])),
            _ => Point::Put(Bytes::from(vec![n as u8; n as usize % 90])),
        };
        run.add_point(Bytes::from(format!("some/key{:05}", n * 13 % 2003)), point);
    }
    for codec in [Codec::Raw, Codec::Lz4] {
        let mut builder = PackedBuilder::new(1024);
        run.points()
            .for_each(|(key, point)| builder.add(key, point));
        let packed = builder.finish().expect("it has points");
        let image = packed.image(codec);
        let direct = segment_image(&run, codec, 1024);
        assert_eq!(image.bytes, direct.bytes);
        assert_eq!(image.checksum, direct.checksum);
        assert!(image.bytes.len() <= packed.stored_bytes_max());
        assert!(packed.memory_bytes < run.memory_bytes() / 2);
        let map = packed.to_mem();
        assert!(map.points().eq(run.points()));
        assert_eq!(map.size_bytes(), run.size_bytes());
    }
    assert!(PackedBuilder::new(1024).finish().is_none());
}
