//! Engines and stores that fail or report false results during checkpoints and restarts of jobs.
//! Each failure is reported in one line, all tasks continue, no files or processes remain, and the
//! previous checkpoint can be restarted.
//!
//! A seed selects some of the cases; with `SEMPA_TEST_FULL=1` all are tried.

use sempa_tests::fake_criu::{self, set_behaviour};
use sempa_tests::faults::leftovers;
use sempa_tests::requirements::testbed_with_own_engine;
use sempa_tests::ring_job::ENDLESS_ROUNDS;
use sempa_tests::rng::{sample, seed};
use sempa_tests::run::CommandResult;
use sempa_tests::vm::Settings;
use sempa_tests::{OrPanicWithLogs, Testbed, Vm, wait_for};
use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

const TIMEOUT: Duration = Duration::from_secs(120);
const WORKERS: usize = 2;

/// A job of three tasks on h1 and h2 that writes one line per round.
struct Job<'a> {
    vm: &'a Vm<'a>,
    folder: PathBuf,
    tid: String,
}

impl<'a> Job<'a> {
    fn start(vm: &'a Vm<'a>) -> Job<'a> {
        vm.compile_program("ring_job").expect("gcc");
        let folder = vm.home().join("ring");
        fs::create_dir_all(&folder).expect("a folder");
        let words = [
            "-h1",
            "ring_job",
            &WORKERS.to_string(),
            ENDLESS_ROUNDS,
            "-2000",
            folder.to_str().expect("text"),
        ];
        let tid = vm.spawn(&words).or_panic_with_logs(vm);
        let job = Job { vm, folder, tid };
        job.wait_for_rounds();
        job
    }

    /// Waits for five more rounds. All tasks contribute to each round.
    fn wait_for_rounds(&self) {
        let lines =
            || fs::read_to_string(self.folder.join("log")).map_or(0, |log| log.lines().count());
        let until = lines() + 5;
        let gone = wait_for(TIMEOUT, || {
            if lines() >= until {
                Ok(())
            } else {
                Err(format!("{} rounds", lines()))
            }
        });
        gone.or_panic_with_logs(self.vm);
    }

    fn checkpoint(&self) -> CommandResult {
        self.vm
            .pvm(&["checkpoint", &self.tid])
            .or_panic_with_logs(self.vm)
    }

    fn make_checkpoint(&self) -> String {
        let values = self.vm.json(&["checkpoint", &self.tid]);
        let values = values.or_panic_with_logs(self.vm);
        values[0]["set"].as_str().expect("a name").to_string()
    }

    /// Makes a checkpoint, which must fail with one line that contains `words`. Checks that the job
    /// continues and nothing of the checkpoint remains.
    fn check_checkpoint_fails(&self, what: &str, words: &[&str]) {
        let sets = store_entries(self.vm);
        let done = self.checkpoint();
        assert!(
            !done.succeeded() && done.err.lines().count() == 1,
            "{what}: {done:?}\n{}",
            self.vm.logs()
        );
        assert!(
            words.iter().all(|word| done.err.contains(word)),
            "{what}: {done:?}"
        );
        eprintln!("{what}: {}", done.err.trim());
        self.wait_for_rounds();
        wait_until_clean(self.vm, &sets, what);
    }

    fn end(&self) {
        assert!(
            self.vm
                .pvm(&["kill", &self.tid])
                .expect("the console")
                .succeeded()
        );
        assert!(self.vm.pvm(&["reset"]).expect("the console").succeeded());
        let ended = wait_for(TIMEOUT, || {
            let left = self.vm.tasks().map_err(|error| error.to_string())?;
            if left.iter().any(|task| task.name == "ring_job") {
                Err(format!("{left:?}"))
            } else {
                Ok(())
            }
        });
        ended.or_panic_with_logs(self.vm);
    }

    /// Restarts a checkpoint, which must fail with `words`. Checks that no task runs and no files
    /// or processes remain.
    fn check_restart_fails(&self, set: &str, what: &str, words: &[&str]) {
        let sets = store_entries(self.vm);
        let done = self.vm.pvm(&["restart", set]).expect("the console");
        assert!(
            !done.succeeded() && done.err.lines().count() == 1,
            "{what}: {done:?}\n{}",
            self.vm.logs()
        );
        assert!(
            words.iter().all(|word| done.err.contains(word)),
            "{what}: {done:?}"
        );
        eprintln!("{what}: {}", done.err.trim());
        for host in self.vm.bed().hosts() {
            sempa_tests::testbed::wait_until_no_process(host, "ring_job", TIMEOUT)
                .unwrap_or_else(|error| panic!("{what}: {error:#}"));
        }
        wait_until_clean(self.vm, &sets, what);
    }

    fn check_restart(&self, set: &str) {
        let done = self.vm.pvm(&["restart", set]).expect("the console");
        assert!(done.succeeded(), "{done:?}\n{}", self.vm.logs());
        self.wait_for_rounds();
    }
}

fn store(vm: &Vm<'_>) -> PathBuf {
    vm.home().join(".local/state/sempa/checkpoints")
}

/// Returns the names of all checkpoints in the store, including incomplete ones.
fn store_entries(vm: &Vm<'_>) -> Vec<String> {
    let entries = fs::read_dir(store(vm)).into_iter().flatten().flatten();
    let mut names: Vec<String> = entries
        .map(|entry| entry.file_name().to_string_lossy().into_owned())
        .collect();
    names.retain(|name| name != "lock");
    names.sort();
    names
}

/// Waits until the store has the entries `before`, and no host has images, resume tokens or an
/// engine process.
fn wait_until_clean(vm: &Vm<'_>, before: &[String], what: &str) {
    let clean = wait_for(TIMEOUT, || {
        let mut left: Vec<String> = store_entries(vm)
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

/// Command words that make the fake CRIU fail, each with words of the error that follows.
const FAILURES: [(&str, &str); 4] = [
    ("silent", "engine"),
    ("garbage", "engine's reply is malformed"),
    ("killed", "killed by signal 9"),
    ("hang", "not done within"),
];
/// Kinds of images that are truncated to half their size.
const IMAGE_KINDS: [&str; 8] = [
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
fn failing_engines_harm_no_job() {
    let seed = seed();
    with_job(
        |_| Settings::default(),
        |bed, _, job| {
            let good = job.make_checkpoint();
            for (what, words) in sample(FAILURES, 1, seed) {
                set_behaviour(bed, "h2", what);
                job.check_checkpoint_fails(what, &["the job continues", words]);
                set_behaviour(bed, "h2", "");
            }
            for kind in sample(IMAGE_KINDS, 2, seed) {
                set_behaviour(bed, "h2", &format!("cut {kind}*.img"));
                let words = ["the job continues", "images: ", kind];
                job.check_checkpoint_fails(&format!("{kind} cut"), &words);
                set_behaviour(bed, "h2", "");
            }
            job.end();
            // The kind of failure differs from the one that was tried with the checkpoint.
            for (what, words) in sample(FAILURES, 1, seed + 1) {
                set_behaviour(bed, "h1", what);
                set_behaviour(bed, "h2", what);
                job.check_restart_fails(&good, what, &["none of its tasks is running", words]);
                set_behaviour(bed, "h1", "");
                set_behaviour(bed, "h2", "");
            }
            job.check_restart(&good);
        },
    );
}

/// Path on h1 where a small file system is mounted for the store.
const STORE: &str = "/tmp/small";

fn with_small_store(bed: &Testbed) -> Settings {
    let done = bed.host(1).shell(
        &format!("mkdir -m 700 {STORE} && mount -t tmpfs -o size=64m,mode=700 none {STORE}"),
        TIMEOUT,
    );
    assert!(
        done.as_ref().is_ok_and(CommandResult::succeeded),
        "{done:?}"
    );
    let env = vec![
        ("SEMPA_STORE".to_string(), format!("{STORE}/store")),
        ("SEMPA_STORE_KEY".to_string(), format!("{STORE}/key")),
    ];
    Settings {
        env,
        ..Settings::default()
    }
}

/// Returns the paths of all files below a folder of h1.
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
    below(&bed.host(1).machine_path(inside), &mut found);
    found
}

fn resize_store(bed: &Testbed, size: &str) {
    let done = bed
        .host(1)
        .shell(&format!("mount -n -o remount,size={size} {STORE}"), TIMEOUT)
        .expect("runs");
    assert!(done.succeeded(), "{done:?}");
}

#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn a_full_or_damaged_store_keeps_older_checkpoints() {
    with_job(with_small_store, |bed, vm, job| {
        let good = job.make_checkpoint();
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
        // The store becomes full at once, during the first task, during the other tasks, and just
        // before the end.
        for part in [0.0, 0.05, 0.3, 0.6, 0.9, 0.99] {
            resize_store(
                bed,
                &format!("{}k", (one_set as f64 * (1.0 + part)) as u64 / 1024),
            );
            job.check_checkpoint_fails(
                &format!("room for {part} of a set"),
                &["the disk is full", "the job continues"],
            );
            let left = wait_for(TIMEOUT, || {
                let now = in_store();
                if now == before {
                    Ok(())
                } else {
                    Err(format!("{now:?}"))
                }
            });
            left.expect("nothing is left of it");
        }
        resize_store(bed, "64m");
        let newer = job.make_checkpoint();
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
                // The file only records since when the checkpoint is unused, and a restart ignores
                // it.
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
                job.check_restart_fails(&newer, &format!("{name} {how}"), &[]);
                fs::write(&path, &bytes).expect("written");
                fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).expect("as it was");
            }
        }
        let listed = vm.pvm(&["checkpoints"]).expect("the console");
        assert!(
            listed.out.contains(&good) && listed.out.contains(&newer),
            "{listed:?}"
        );
        job.check_restart(&newer);
        job.end();
        job.check_restart(&good);
        job.end();
        // The restart has truncated the log to the older checkpoint, so a restart of the newer one
        // would leave a gap.
        job.check_restart_fails(
            &newer,
            "a log that is shorter",
            &["log has become shorter since the checkpoint", "truncate -s"],
        );
        job.check_restart(&good);
    });
}

#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn an_unusable_store_key_is_named() {
    with_job(with_small_store, |bed, _, job| {
        let key = bed.host(1).machine_path(&format!("{STORE}/key"));
        fs::write(&key, "short").expect("written");
        fs::set_permissions(&key, fs::Permissions::from_mode(0o600)).expect("its mode");
        job.check_checkpoint_fails(
            "a short key",
            &["cannot use the key file", "the job continues"],
        );
        fs::write(&key, [7; 32]).expect("written");
        fs::set_permissions(&key, fs::Permissions::from_mode(0o644)).expect("its mode");
        job.check_checkpoint_fails(
            "a key that others can read",
            &["cannot use the key file", "the job continues"],
        );
        fs::remove_file(&key).expect("removed");
        fs::create_dir(&key).expect("made");
        job.check_checkpoint_fails(
            "a folder for a key",
            &["cannot use the key file", "the job continues"],
        );
        fs::remove_dir(&key).expect("removed");
        let set = job.make_checkpoint();
        job.end();
        job.check_restart(&set);
    });
}
