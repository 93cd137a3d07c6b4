//! Forks through the command, on mounts of both transports.

use std::fs;
use std::io::{BufRead, BufReader};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use ramet_e2e::{Bed, done, ramet_bin, refused, run, run_ok, text};
use serde_json::Value;

const TRANSPORTS: [&str; 2] = ["io_uring", "no_io_uring"];
/// The longest wait for a process of a test.
const PATIENCE: Duration = Duration::from_secs(60);

fn parsed(told: &str) -> Vec<Value> {
    serde_json::from_str(told).expect("JSON")
}

/// The names of forks in a list, with a field of each.
fn field(list: &[Value], name: &str) -> Vec<(String, Value)> {
    let of = |fork: &Value| {
        let path = Path::new(fork["path"].as_str().expect("a path"));
        let last = path.file_name().expect("it has a name");
        (last.to_string_lossy().into_owned(), fork[name].clone())
    };
    list.iter().map(of).collect()
}

/// A process that uses something, ended with the test.
struct Busy(Child);

impl Busy {
    /// Runs a script in Python that prints a line once it is ready.
    fn run(script: &str, args: &[&str]) -> Busy {
        let mut command = Command::new("python3");
        command.args(["-c", script]).args(args);
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("python3 runs");
        let out = child.stdout.take().expect("it is a pipe");
        let busy = Busy(child);
        let (send, ready) = mpsc::channel();
        thread::spawn(move || {
            let mut line = String::new();
            let read = BufReader::new(out).read_line(&mut line);
            let _ = send.send(read.is_ok() && line == "ready\n");
        });
        assert_eq!(ready.recv_timeout(PATIENCE), Ok(true));
        busy
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A project with a file, a folder and a hard link.
fn project(root: &Path) {
    let project = root.join("project");
    fs::create_dir_all(project.join("sub")).expect("there is room");
    fs::write(project.join("file"), "first").expect("there is room");
    fs::write(project.join("sub/linked"), "linked").expect("there is room");
    fs::hard_link(project.join("sub/linked"), project.join("other")).expect("there is room");
}

#[test]
fn forks_are_made_told_reset_and_dropped() {
    for transport in TRANSPORTS {
        let bed = Bed::new("256M");
        let mount = bed.mount(&["-o", transport]);
        let root = text(mount.root()).to_owned();
        let at = |name: &str| format!("{root}/{name}");
        project(mount.root());
        assert_eq!(done(&["fork", &at("project")]).trim(), at("project-fork-1"));
        let made = parsed(&done(&["fork", "-n", "2", "--json", &at("project")]));
        assert_eq!(made[0]["path"], at("project-fork-2"));
        assert_eq!(made[1]["path"], at("project-fork-3"));
        let args = ["fork", "-n", "2", "--note", "a \"try\"", "--no-base"];
        done(&[&args[..], &[&at("project-fork-1"), &at("try")]].concat());
        assert!(refused(&["fork", &at("project"), &at("try-1")]).contains("replaces nothing"));
        let taken = refused(&["fork", "-n", "3", &at("project"), &at("try")]);
        assert!(taken.contains("try-1: already exists"), "{taken}");
        assert!(
            !Path::new(&at("try-3")).exists(),
            "all names are looked at first"
        );
        assert!(refused(&["fork", &at("project/file")]).contains("ramet clone"));
        assert!(refused(&["fork", "/etc", &at("x")]).contains("not on a Ramet mount"));
        assert!(refused(&["fork", "--note", "a\nb", &at("project")]).contains("note"));
        for (path, content) in [("file", "changed"), ("sub/new", "new")] {
            fs::write(mount.root().join("project-fork-1").join(path), content)
                .expect("there is room");
        }
        fs::rename(at("project-fork-2"), at("project/moved")).expect("it is there");
        let told = parsed(&done(&["forks", "--json", &root]));
        let names: Vec<_> = field(&told, "note");
        let name = |name: &str, note: &str| (name.to_owned(), Value::from(note));
        assert_eq!(
            names,
            [
                name("project-fork-1", ""),
                name("moved", ""),
                name("project-fork-3", ""),
                name("try-1", "a \"try\""),
                name("try-2", "a \"try\""),
            ]
        );
        let changed: Vec<Value> = field(&told, "changed").into_iter().map(|f| f.1).collect();
        let none = Value::Null;
        assert_eq!(changed, [2.into(), 0.into(), 0.into(), none.clone(), none]);
        assert_eq!(told[0]["origin"], at("project"));
        assert_eq!(told[3]["origin_fork"], told[0]["id"]);
        for key in ["private_bytes", "base_bytes", "freed_bytes"] {
            assert!(told[0][key].is_u64(), "{key}");
        }
        let accents = at("projet-\u{e9}t\u{e9}");
        fs::create_dir(&accents).expect("there is room");
        done(&["fork", &accents]);
        let of_it = parsed(&done(&["forks", "--json", "-q", &accents]));
        assert_eq!(of_it[0]["origin"], accents);
        assert_eq!(of_it[0]["origin_then"], "projet-\u{e9}t\u{e9}");
        done(&["drop", &format!("{accents}-fork-1")]);
        assert!(refused(&["forks", &at("typo")]).contains("no such file"));
        assert_eq!(told[0]["in_use"], Value::Array(Vec::new()));
        let tree = done(&["forks", "--quick", &root]);
        let lines: Vec<&str> = tree.lines().collect();
        assert_eq!(lines[0], at("project"), "{tree}");
        assert!(
            lines[1].starts_with(&format!("  {}  ", at("project-fork-1"))),
            "{tree}"
        );
        assert!(
            lines[2].starts_with(&format!("    {}  ", at("try-1"))),
            "{tree}"
        );
        assert!(lines[2].ends_with("no base  \"a \\\"try\\\"\""), "{tree}");
        let of_one = parsed(&done(&["forks", "--json", "-q", &at("project-fork-1")]));
        assert_eq!(of_one.len(), 3, "{of_one:?}");
        assert!(of_one[0].get("changed").is_none());
        done(&["reset", &at("project-fork-1")]);
        let content = fs::read_to_string(at("project-fork-1/file")).expect("it is there");
        assert_eq!(content, "first");
        assert!(!Path::new(&at("project-fork-1/sub/new")).exists());
        assert!(refused(&["reset", &at("try-1")]).contains("--no-base"));
        let told = refused(&["reset", &at("project")]);
        assert!(told.ends_with("is no fork\n"), "{told}");
        assert!(refused(&["drop", &at("project")]).contains("ramet rm"));
        fs::remove_dir_all(at("try-2")).expect("it is there");
        done(&[
            "drop",
            &at("project-fork-1"),
            &at("project/moved"),
            &at("try-1"),
        ]);
        let left = field(&parsed(&done(&["forks", "--json", &root])), "base");
        assert_eq!(left, [("project-fork-3".to_owned(), Value::Bool(true))]);
        mount.umount();
        bed.fsck();
    }
}

#[test]
fn a_fork_that_a_process_uses_stays() {
    const USES: [(&str, &str); 4] = [
        ("cwd", "os.chdir(sys.argv[1] + '/sub')"),
        ("open", "f = open(sys.argv[1] + '/file')"),
        (
            "mapped",
            "f = os.open(sys.argv[1] + '/other', os.O_RDWR)\n\
             ctypes.CDLL(None).mmap(None, 4096, 1, 1, f, 0)\n\
             os.close(f)",
        ),
        ("open", "f = os.open(sys.argv[1], os.O_RDONLY)"),
    ];
    let bed = Bed::new("256M");
    let mount = bed.mount(&[]);
    let root = text(mount.root()).to_owned();
    project(mount.root());
    for (how, statement) in USES {
        let fork = format!("{root}/project-fork-1");
        done(&["fork", &format!("{root}/project")]);
        let script = format!(
            "import ctypes, os, sys\n{statement}\nprint('ready', flush=True)\nsys.stdin.read()"
        );
        let busy = Busy::run(&script, &[&fork]);
        for verb in ["drop", "reset"] {
            let said = refused(&[verb, &fork]);
            let by = format!("in use by {} python3", busy.0.id());
            assert!(
                said.contains(&by) && said.contains("--force"),
                "{how}: {said}"
            );
        }
        let told = parsed(&done(&["forks", "--json", &root]));
        assert_eq!(told[0]["in_use"][0]["pid"], busy.0.id(), "{told:?}");
        assert_eq!(told[0]["in_use"][0]["how"], how, "{told:?}");
        // A use of the source is none of the fork.
        let source = Busy::run(&script, &[&format!("{root}/project")]);
        drop(busy);
        done(&["reset", &fork]);
        drop(source);
        let busy = Busy::run(&script, &[&fork]);
        done(&["drop", "--force", &fork]);
        assert!(!Path::new(&fork).exists());
        drop(busy);
    }
    mount.umount();
    bed.fsck();
}

#[test]
fn the_root_of_a_mount_has_forks_inside_alone() {
    let bed = Bed::new("256M");
    let mount = bed.mount(&[]);
    let root = text(mount.root()).to_owned();
    project(mount.root());
    let slash = format!("{root}/");
    for path in [&root, &slash] {
        let said = refused(&["fork", path]);
        assert!(said.contains("is the root of a mount"), "{said}");
        assert!(said.contains("'ramet fork SRC SRC/NAME'"), "{said}");
    }
    let here = |args: &[&str]| {
        let mut command = Command::new(ramet_bin());
        command.args(args).current_dir(&root).stdin(Stdio::null());
        command.output().expect("it runs")
    };
    let out = here(&["try", ".", "--", "true"]);
    let said = String::from_utf8_lossy(&out.stderr);
    assert_eq!(out.status.code(), Some(125), "{said}");
    assert!(said.contains("is the root of a mount"), "{said}");
    assert!(
        said.contains("'ramet try --name SRC/NAME SRC' makes"),
        "{said}"
    );
    let inside = format!("{root}/inside");
    assert_eq!(done(&["fork", &root, &inside]).trim(), inside);
    assert!(Path::new(&format!("{inside}/project/file")).exists());
    done(&["drop", &inside]);
    let script = "echo second > project/file && test ! -e inside";
    let args = ["--commit", "--name", "inside", ".", "--", "sh", "-c"];
    let out = here(&[&["try"], &args[..], &[script]].concat());
    assert!(out.status.success(), "{out:?}");
    let content = fs::read_to_string(mount.root().join("project/file")).expect("it is there");
    assert_eq!(content, "second\n");
    assert!(!Path::new(&inside).exists());
    // No volume is there.
    assert!(refused(&["fork", "/proc"]).contains("not on a Ramet mount"));
    mount.umount();
    bed.fsck();
}

/// Forks that two commands drop at once.
const DROPPED_TWICE: usize = 40;

#[test]
fn forks_that_two_drop_at_once_are_no_error_for_either() {
    let bed = Bed::new("256M");
    let mount = bed.mount(&[]);
    let at = |name: &str| text(&mount.root().join(name)).to_owned();
    project(mount.root());
    let count = DROPPED_TWICE.to_string();
    for _ in 0..3 {
        done(&["fork", "-n", &count, &at("project"), &at("x")]);
        let names: Vec<String> = (1..=DROPPED_TWICE).map(|n| at(&format!("x-{n}"))).collect();
        let drop = |names: &[String]| {
            let mut command = Command::new(ramet_bin());
            command.arg("drop").args(names).stderr(Stdio::piped());
            command.spawn().expect("it starts")
        };
        let both = [drop(&names[..30]), drop(&names[10..])];
        for one in both.map(|child| child.wait_with_output().expect("it ends")) {
            assert!(one.status.success() && one.stderr.is_empty(), "{one:?}");
        }
        assert_eq!(done(&["forks", &at("project")]), "");
    }
    let said = refused(&["drop", &at("x-0")]);
    assert!(said.contains("no such file"), "{said}");
    // A fork that was renamed was not dropped.
    done(&["fork", &at("project"), &at("y")]);
    fs::rename(at("y"), at("z")).expect("it is there");
    let said = refused(&["drop", &at("y")]);
    assert!(said.contains("no such file"), "{said}");
    done(&["drop", &at("z")]);
    mount.umount();
    bed.fsck();
}

#[test]
fn users_have_forks_of_their_own() {
    let bed = Bed::new("256M");
    let bin = bed.command_for_others();
    let mount = bed.mount(&[]);
    let root = text(mount.root()).to_owned();
    fs::set_permissions(mount.root(), fs::Permissions::from_mode(0o1777)).expect("it is ours");
    let as_user = |uid: u32, args: &[&str]| -> Output {
        let ids = [format!("--reuid={uid}"), format!("--regid={uid}")];
        let all = [&[&ids[0][..], &ids[1], "--clear-groups", text(&bin)], args];
        run("setpriv", &all.concat())
    };
    let make = |uid: u32, name: &str, mode: u32| {
        let path = mount.root().join(name);
        fs::create_dir(&path).expect("there is room");
        fs::write(path.join("file"), "text").expect("there is room");
        std::os::unix::fs::chown(&path, Some(uid), Some(uid)).expect("this is root");
        fs::set_permissions(&path, fs::Permissions::from_mode(mode)).expect("it is ours");
        text(&path).to_owned()
    };
    let (open, closed) = (make(1234, "open", 0o755), make(1234, "closed", 0o700));
    for args in [
        &["fork", &open][..],
        &["fork", &open, &format!("{closed}/hidden")],
    ] {
        let out = as_user(1234, args);
        assert!(out.status.success(), "{out:?}");
    }
    let list = |uid: u32| {
        let out = as_user(uid, &["forks", "--json", &root]);
        assert!(out.status.success(), "{out:?}");
        parsed(&String::from_utf8_lossy(&out.stdout))
    };
    let own = list(1234);
    assert_eq!(field(&own, "changed").len(), 2);
    assert!(own.iter().all(|fork| fork["changed"] == 0), "{own:?}");
    let others = list(4321);
    assert_eq!(
        field(&others, "uid"),
        [("open-fork-1".to_owned(), 1234.into())]
    );
    assert!(others[0].get("changed").is_none() && others[0].get("in_use").is_none());
    assert_eq!(others[0]["origin_then"], Value::Null);
    let fork = format!("{open}-fork-1");
    for (args, why) in [
        (&["drop", &fork][..], "owner"),
        (&["drop", "--force", &fork], "owner"),
        (&["reset", "--force", &fork], "owner"),
        (&["fork", &open, &format!("{root}/mine")], "owner"),
    ] {
        let out = as_user(4321, args);
        let said = String::from_utf8_lossy(&out.stderr);
        assert!(
            !out.status.success() && said.contains(why),
            "{args:?}: {said}"
        );
    }
    for args in [&["reset", &fork][..], &["drop", &fork]] {
        let out = as_user(1234, args);
        assert!(out.status.success(), "{out:?}");
    }
    assert_eq!(list(0).len(), 1);
    mount.umount();
    bed.fsck();
}

#[test]
fn bytes_of_mappings_are_in_a_fork_and_its_base() {
    const STORES: &str = r#"
import mmap, os, subprocess, sys
root, ramet = sys.argv[1:3]
os.mkdir(root + "/src")
fd = os.open(root + "/src/mapped", os.O_RDWR | os.O_CREAT)
os.ftruncate(fd, 1 << 20)
pages = mmap.mmap(fd, 1 << 20)
for number in range(10):
    pages[number * 4096:number * 4096 + 4] = b"%04d" % number
    subprocess.run([ramet, "fork", root + "/src", root + "/f%d" % number], check=True)
"#;
    let bed = Bed::new("256M");
    let mount = bed.mount(&[]);
    let root = text(mount.root()).to_owned();
    run_ok("python3", &["-c", STORES, &root, text(ramet_bin())]);
    for number in [0, 4, 9] {
        let fork = format!("{root}/f{number}");
        let must_be_then = || {
            let bytes = fs::read(format!("{fork}/mapped")).expect("it is there");
            for page in 0..10 {
                let stored = format!("{page:04}").into_bytes();
                let want = if page <= number { stored } else { vec![0; 4] };
                assert_eq!(
                    &bytes[page * 4096..page * 4096 + 4],
                    want,
                    "page {page} of {number}"
                );
            }
        };
        must_be_then();
        fs::write(format!("{fork}/mapped"), "gone").expect("there is room");
        done(&["reset", &fork]);
        must_be_then();
    }
    mount.umount();
    bed.fsck();
}
