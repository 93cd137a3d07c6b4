//! Hard links on a mount: between clones and their surroundings, and many of them below a tree.

use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use ramet_e2e::{Bed, Mount, until};

const TRANSPORTS: [&str; 2] = ["no_io_uring", "io_uring"];

fn sh(dir: &Path, script: &str) {
    let mut shell = Command::new("bash");
    let out = shell
        .args(["-euo", "pipefail", "-c", script])
        .current_dir(dir)
        .output()
        .expect("a shell runs");
    let said = String::from_utf8_lossy(&out.stderr);
    assert!(out.status.success(), "{script}: {said}");
}

fn for_each_transport(each: impl Fn(&Mount)) {
    for transport in TRANSPORTS {
        let bed = Bed::new("2G");
        let mount = bed.mount(&["-o", transport]);
        each(&mount);
        mount.umount();
        bed.fsck();
    }
}

#[test]
fn programs_link_between_a_clone_and_directories_beside_it() {
    for_each_transport(|mount| {
        let root = mount.root();
        sh(root, "mkdir -p tpl/d; echo a > tpl/d/a; echo b > tpl/b");
        mount.clone_path(&root.join("tpl"), &root.join("clone"));
        let script = r#"
            cp -al clone linked
            [ clone/d/a -ef linked/d/a ]; [ "$(stat -c %h clone/d/a)" = 2 ]
            mkdir backup; rsync -a --link-dest="$PWD/clone" clone/ backup/
            [ clone/b -ef backup/b ]; [ "$(stat -c %h linked/b)" = 3 ]
            ln backup/b clone/e; mv clone/e tpl/e; [ tpl/e -ef linked/b ]
            rm -r linked; [ "$(stat -c %h tpl/e)" = 3 ]
            git init -q repo
            cd repo; echo 1 > f; git add f; git -c user.name=a -c user.email=a@b commit -qm 1
        "#;
        sh(root, script);
        mount.clone_path(&root.join("repo"), &root.join("fork"));
        sh(
            root,
            "git clone -q --local fork other; git -C other fsck --strict",
        );
        // A clone of a tree with links outside is whole, and apart from them.
        mount.clone_path(&root.join("clone"), &root.join("again"));
        sh(
            root,
            r#"[ "$(stat -c %h again/b)" = 1 ]; echo c > again/b; [ "$(cat tpl/e)" = b ]"#,
        );
    });
}

#[test]
fn overlay_has_its_upper_directory_in_a_clone() {
    if !rustix::process::geteuid().is_root() {
        println!("not root: no overlay");
        return;
    }
    for_each_transport(|mount| {
        let root = mount.root();
        sh(
            root,
            "mkdir -p tpl lower/d work merged; echo 1 > lower/1; echo 2 > lower/d/2",
        );
        mount.clone_path(&root.join("tpl"), &root.join("upper"));
        let script = r#"
            mount -t overlay overlay -o lowerdir=lower,upperdir=upper,workdir=work merged
            trap 'umount merged' EXIT
            rm merged/1; [ ! -e merged/1 ]
            mv merged/d/2 merged/2 && echo 3 >> merged/2
            rm -r merged/d; mkdir merged/d; [ -z "$(ls merged/d)" ]
            ln merged/2 merged/3; [ "$(stat -c %h merged/3)" = 2 ]
            for n in $(seq 40); do echo > merged/n$n; done; rm merged/n*
        "#;
        sh(root, script);
    });
}

/// A store and a directory of links into it, as pnpm makes them.
const STORE: &str = r#"
import os
for n in range(6000):
    if n % 100 == 0:
        os.makedirs(f"store/{n // 100}"); os.makedirs(f"app/modules/{n // 100}")
    name = f"{n // 100}/{n}"
    with open(f"store/{name}", "w") as file: file.write(name)
    os.link(f"store/{name}", f"app/modules/{name}")
"#;

#[test]
fn counts_of_many_links_are_right_at_once_and_settled_in_the_background() {
    for_each_transport(|mount| {
        let root = mount.root();
        std::fs::write(root.join("make.py"), STORE).expect("there is room");
        sh(root, "python3 make.py; mkdir small");
        let paths = ["app", "c1", "c2", "small"].map(|name| root.join(name));
        let [app, one, two, small] = &paths;
        mount.clone_path(app, one);
        mount.clone_path(one, two);
        sh(
            root,
            r#"[ "$(stat -c %h c1/modules/7/777 c2/modules/7/777 | sort -u)" = 1 ]"#,
        );
        sh(root, r#"[ "$(stat -c %h store/7/777)" = 2 ]"#);
        mount.replace_path(one, app);
        mount.replace_path(small, two);
        let begun = Instant::now();
        while mount.stat()["links_waiting"] == true {
            assert!(begun.elapsed() < Duration::from_secs(60), "links wait");
            std::thread::sleep(Duration::from_millis(20));
        }
        // The kernel was told of each of them.
        sh(
            root,
            r#"[ -z "$(find store app c1 -type f -not -links 1)" ]"#,
        );
        sh(
            root,
            "ln c1/modules/7/777 store/outside; ln app/modules/7/778 c1/inside",
        );
        sh(
            root,
            r#"[ "$(stat -c %h c1/inside store/outside | sort -u)" = 2 ]"#,
        );
        sh(
            root,
            r#"[ "$(find c1 app -type f -links 1 | wc -l)" = 11998 ]"#,
        );
        mount.remove(one);
        sh(
            root,
            r#"[ "$(stat -c %h store/outside)" = 1 ]; [ "$(cat store/outside)" = 7/777 ]"#,
        );
        assert_eq!(mount.stat()["links_failures"], 0);
    });
}

/// Bytes that a removed tree gives back, beside the ones of the files that stay open.
const LARGE: u64 = 8 << 20;

#[test]
fn removed_tree_gives_its_space_back_when_its_open_hard_link_is_closed() {
    let in_one = ("mkdir t; echo x > t/g; ln t/g t/h", "t", "t/g");
    let in_three = "mkdir -p t/d/e; echo x > t/d/e/g; ln t/d/e/g out; ln t/d/e/g t/h";
    let cloned = "mkdir -p s/d; echo x > s/d/g; ln s/d/g s/h";
    for (made, gone, name) in [in_one, (in_three, "t", "t/d/e/g"), (cloned, "c", "c/d/g")] {
        for_each_transport(|mount| {
            let root = mount.root();
            sh(root, made);
            if gone == "c" {
                mount.clone_path(&root.join("s"), &root.join("c"));
            }
            let tree = root.join(gone);
            let script = "head -c 8M /dev/urandom > big; find . | xargs stat > /dev/null";
            sh(&tree, script);
            let before = mount.allocated_settled();
            let open = File::open(root.join(name)).expect("a file");
            mount.remove(&tree);
            drop(open);
            until("the space of a removed tree comes back", || {
                mount.allocated_settled() + LARGE / 2 < before
            });
        });
    }
}

#[test]
fn removed_trees_leave_open_hard_links_without_names() {
    for_each_transport(|mount| {
        let root = mount.root();
        let script = "mkdir -p s/t n; echo x > s/a; ln s/a s/b; echo y > s/t/g; ln s/t/g s/l";
        sh(root, script);
        // Clones of a directory with all names, with one of two, and below another directory.
        for (source, clone, name, gone) in [
            ("s", "c", "c/a", "c"),
            ("s/t", "d", "d/g", "d"),
            ("s", "n/c", "n/c/a", "n"),
        ] {
            mount.clone_path(&root.join(source), &root.join(clone));
            let open = File::open(root.join(name)).expect("a file");
            assert!(open.metadata().expect("a status").nlink() > 0);
            mount.remove(&root.join(gone));
            until("an open file of a removed tree has no name", || {
                open.metadata().expect("a status").nlink() == 0
            });
        }
    });
}
