//! Engines and stores that fail or lie during checkpoints and restarts of jobs. Each failure is
//! reported in one line, all tasks continue, no files or processes remain, and the checkpoint made
//! before can be restarted.
//!
//! A seed chooses some of the cases; with `SEMPA_TEST_FULL=1` all are tried.

use sempa_tests::fake_criu::{self, behave};
use sempa_tests::faults::leftovers;
use sempa_tests::needs::testbed_with_own_engine;
use sempa_tests::ring_job::ENDLESS;
use sempa_tests::rng::{sample, seed};
use sempa_tests::run::Done;
use sempa_tests::vm::Settings;
use sempa_tests::{Sure, Testbed, Vm, eventually};
use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

const TIMEOUT: Duration = Duration::from_secs(120);
const WORKERS: usize = 2;

/// A job of three tasks on h1 and h2 that writes a line per round.
struct Job<'a> {
    vm: &'a Vm<'a>,
    folder: PathBuf,
    tid: String,
}

impl<'a> Job<'a> {
    fn start(vm: &'a Vm<'a>) -> Job<'a> {
        vm.program("ring_job").expect("gcc");
        let folder = vm.home().join("ring");
        fs::create_dir_all(&folder).expect("a folder");
        let words = [
            "-h1",
            "ring_job",
            &WORKERS.to_string(),
            ENDLESS,
            "-2000",
            folder.to_str().expect("text"),
        ];
        let tid = vm.spawn(&words).sure(vm);
        let job = Job { vm, folder, tid };
        job.goes_on();
        job
    }

    /// Waits for some rounds, to each of which all tasks contribute.
    fn goes_on(&self) {
        let lines =
            || fs::read_to_string(self.folder.join("log")).map_or(0, |log| log.lines().count());
        let until = lines() + 5;
        let gone = eventually(TIMEOUT, || {
            if lines() >= until {
                Ok(())
            } else {
                Err(format!("{} rounds", lines()))
            }
        });
        gone.sure(self.vm);
    }

    fn checkpoint(&self) -> Done {
        self.vm.pvm(&["checkpoint", &self.tid]).sure(self.vm)
    }

    fn good_checkpoint(&self) -> String {
        let values = self.vm.json(&["checkpoint", &self.tid]);
        let values = values.sure(self.vm);
        values[0]["set"].as_str().expect("a name").to_string()
    }

    /// Makes a checkpoint, which must fail with these words in one line. The job continues, and
    /// nothing is left of the checkpoint.
    fn fails(&self, what: &str, words: &[&str]) {
        let sets = sets(self.vm);
        let done = self.checkpoint();
        assert!(
            !done.good() && done.err.lines().count() == 1,
            "{what}: {done:?}\n{}",
            self.vm.logs()
        );
        assert!(
            words.iter().all(|word| done.err.contains(word)),
            "{what}: {done:?}"
        );
        eprintln!("{what}: {}", done.err.trim());
        self.goes_on();
        nothing_new(self.vm, &sets, what);
    }

    fn end(&self) {
        assert!(
            self.vm
                .pvm(&["kill", &self.tid])
                .expect("the console")
                .good()
        );
        assert!(self.vm.pvm(&["reset"]).expect("the console").good());
        let ended = eventually(TIMEOUT, || {
            let left = self.vm.tasks().map_err(|error| error.to_string())?;
            if left.iter().any(|task| task.name == "ring_job") {
                Err(format!("{left:?}"))
            } else {
                Ok(())
            }
        });
        ended.sure(self.vm);
    }

    /// Restarts a checkpoint, which must fail with these words. No task runs, and nothing is left.
    fn is_not_started(&self, set: &str, what: &str, words: &[&str]) {
        let sets = sets(self.vm);
        let done = self.vm.pvm(&["restart", set]).expect("the console");
        assert!(
            !done.good() && done.err.lines().count() == 1,
            "{what}: {done:?}\n{}",
            self.vm.logs()
        );
        assert!(
            words.iter().all(|word| done.err.contains(word)),
            "{what}: {done:?}"
        );
        eprintln!("{what}: {}", done.err.trim());
        for host in self.vm.bed().hosts() {
            sempa_tests::testbed::gone(host, "ring_job", TIMEOUT)
                .unwrap_or_else(|error| panic!("{what}: {error:#}"));
        }
        nothing_new(self.vm, &sets, what);
    }

    fn starts_again(&self, set: &str) {
        let done = self.vm.pvm(&["restart", set]).expect("the console");
        assert!(done.good(), "{done:?}\n{}", self.vm.logs());
        self.goes_on();
    }
}

fn store(vm: &Vm<'_>) -> PathBuf {
    vm.home().join(".local/state/sempa/checkpoints")
}

/// Returns the checkpoints in the store, also incomplete ones.
fn sets(vm: &Vm<'_>) -> Vec<String> {
    let entries = fs::read_dir(store(vm)).into_iter().flatten().flatten();
    let mut names: Vec<String> = entries
        .map(|entry| entry.file_name().to_string_lossy().into_owned())
        .collect();
    names.retain(|name| name != "lock");
    names.sort();
    names
}

/// Waits until the store is as before, and no host has images, tokens or an engine.
fn nothing_new(vm: &Vm<'_>, before: &[String], what: &str) {
    let clean = eventually(TIMEOUT, || {
        let mut left: Vec<String> = sets(vm)
            .into_iter()
            .filter(|name| !before.contains(name))
            .collect();
        for host in vm.bed().hosts() {
            left.extend(leftovers(host));
            let engine = |line: &String| fake_criu::is_engine(line);
            left.extend(
                host.processes()
                    .into_iter()
                    .map(|(_, line)| line)
                    .filter(engine),
            );
        }
        if left.is_empty() {
            Ok(())
        } else {
            Err(left.join(", "))
        }
    });
    clean.unwrap_or_else(|error| panic!("{what}: {error:#}\n{}", vm.logs()));
}

fn with_job(
    settings: impl Fn(&Testbed) -> Settings,
    test: impl FnOnce(&Testbed, &Vm<'_>, &Job<'_>),
) {
    let bed = testbed_with_own_engine(2);
    fake_criu::install(&bed);
    let vm = Vm::start(&bed, settings(&bed)).expect("a virtual machine");
    vm.add(&["h2"]).expect("the other one joins");
    let job = Job::start(&vm);
    test(&bed, &vm, &job);
    vm.halt().expect("halts");
}

/// What an engine does instead of the request, and words of the error that follows.
const LIES: [(&str, &str); 4] = [
    ("silent", "engine"),
    ("garbage", "engine's reply is malformed"),
    ("killed", "killed by signal 9"),
    ("hang", "not done within"),
];
/// Kinds of images that are cut in half.
const IMAGES: [&str; 8] = [
    "inventory",
    "files",
    "pstree",
    "core-",
    "mm-",
    "fdinfo-",
    "pagemap-",
    "pages-",
];

#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn lying_engines_harm_no_job() {
    let seed = seed();
    with_job(
        |_| Settings::default(),
        |bed, _, job| {
            let good = job.good_checkpoint();
            for (what, words) in sample(LIES, 1, seed) {
                behave(bed, "h2", what);
                job.fails(what, &["the job goes on", words]);
                behave(bed, "h2", "");
            }
            for kind in sample(IMAGES, 2, seed) {
                behave(bed, "h2", &format!("cut {kind}*.img"));
                let words = ["the job goes on", "images: ", kind];
                job.fails(&format!("{kind} cut"), &words);
                behave(bed, "h2", "");
            }
            job.end();
            // Not the kind that the checkpoint has met.
            for (what, words) in sample(LIES, 1, seed + 1) {
                behave(bed, "h1", what);
                behave(bed, "h2", what);
                job.is_not_started(&good, what, &["nothing of it runs", words]);
                behave(bed, "h1", "");
                behave(bed, "h2", "");
            }
            job.starts_again(&good);
        },
    );
}

/// A small file system for the store, on h1.
const STORE: &str = "/tmp/small";

fn with_small_store(bed: &Testbed) -> Settings {
    let done = bed.host(1).shell(
        &format!("mkdir -m 700 {STORE} && mount -t tmpfs -o size=64m,mode=700 none {STORE}"),
        TIMEOUT,
    );
    assert!(done.as_ref().is_ok_and(Done::good), "{done:?}");
    let env = vec![
        ("SEMPA_STORE".to_string(), format!("{STORE}/store")),
        ("SEMPA_STORE_KEY".to_string(), format!("{STORE}/key")),
    ];
    Settings {
        env,
        ..Settings::default()
    }
}

/// Returns all files below a folder of h1.
fn files(bed: &Testbed, inside: &str) -> Vec<PathBuf> {
    fn below(folder: &Path, found: &mut Vec<PathBuf>) {
        for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
            if entry.path().is_dir() {
                below(&entry.path(), found)
            } else {
                found.push(entry.path())
            }
        }
    }
    let mut found = Vec::new();
    below(&bed.host(1).path(inside), &mut found);
    found
}

#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn a_full_or_damaged_store_keeps_older_checkpoints() {
    with_job(with_small_store, |bed, vm, job| {
        let good = job.good_checkpoint();
        let room = |size: &str| {
            let done = bed
                .host(1)
                .shell(&format!("mount -n -o remount,size={size} {STORE}"), TIMEOUT)
                .expect("runs");
            assert!(done.good(), "{done:?}");
        };
        let in_store = || {
            let mut names = files(bed, STORE);
            names.sort();
            names
        };
        let before = in_store();
        let one_set: u64 = before
            .iter()
            .filter_map(|path| fs::metadata(path).ok())
            .map(|meta| meta.blocks() * 512)
            .sum();
        // Full at once, during the first task, during the others, and just before the end.
        for part in [0.0, 0.05, 0.3, 0.6, 0.9, 0.99] {
            room(&format!(
                "{}k",
                (one_set as f64 * (1.0 + part)) as u64 / 1024
            ));
            job.fails(
                &format!("room for {part} of a set"),
                &["the disk is full", "the job goes on"],
            );
            let left = eventually(TIMEOUT, || {
                let now = in_store();
                if now == before {
                    Ok(())
                } else {
                    Err(format!("{now:?}"))
                }
            });
            left.expect("nothing is left of it");
        }
        room("64m");
        let newer = job.good_checkpoint();
        job.end();
        let set = format!("{STORE}/store/{newer}");
        for path in files(bed, &set) {
            let bytes = fs::read(&path).expect("readable");
            if bytes.is_empty() {
                continue;
            }
            let name = path
                .file_name()
                .expect("a name")
                .to_string_lossy()
                .into_owned();
            if name == "ended" {
                // It only says since when the checkpoint is unused, and a restart ignores it.
                fs::write(&path, b"\xffnonsense").expect("written");
                continue;
            }
            let mut changed = bytes.clone();
            changed[bytes.len() / 3] ^= 1;
            for (how, bad) in [
                ("changed", Some(&changed[..])),
                ("cut", Some(&bytes[..bytes.len() / 2])),
                ("missing", None),
            ] {
                match bad {
                    Some(bad) => fs::write(&path, bad).expect("written"),
                    None => fs::remove_file(&path).expect("removed"),
                }
                job.is_not_started(&newer, &format!("{name} {how}"), &[]);
                fs::write(&path, &bytes).expect("written");
                fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).expect("as it was");
            }
        }
        let listed = vm.pvm(&["checkpoints"]).expect("the console");
        assert!(
            listed.out.contains(&good) && listed.out.contains(&newer),
            "{listed:?}"
        );
        job.starts_again(&newer);
        job.end();
        job.starts_again(&good);
        job.end();
        // The log was cut back to the older checkpoint, so the newer one would leave a gap.
        job.is_not_started(
            &newer,
            "a log that is shorter",
            &["log has become shorter since the checkpoint", "truncate -s"],
        );
        job.starts_again(&good);
    });
}

#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn an_unusable_store_key_is_named() {
    with_job(with_small_store, |bed, _, job| {
        let key = bed.host(1).path(&format!("{STORE}/key"));
        fs::write(&key, "short").expect("written");
        fs::set_permissions(&key, fs::Permissions::from_mode(0o600)).expect("its mode");
        job.fails(
            "a short key",
            &["cannot use the key file", "the job goes on"],
        );
        fs::write(&key, [7; 32]).expect("written");
        fs::set_permissions(&key, fs::Permissions::from_mode(0o644)).expect("its mode");
        job.fails(
            "a key that others can read",
            &["cannot use the key file", "the job goes on"],
        );
        fs::remove_file(&key).expect("removed");
        fs::create_dir(&key).expect("made");
        job.fails(
            "a folder for a key",
            &["cannot use the key file", "the job goes on"],
        );
        fs::remove_dir(&key).expect("removed");
        let set = job.good_checkpoint();
        job.end();
        job.starts_again(&set);
    });
}
