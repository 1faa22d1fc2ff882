//! Engines and stores that fail or report false results during checkpoints and restarts of jobs.
//! Each failure is reported in one line, all tasks continue, no files or processes remain, and the
//! previous checkpoint can be restarted.
//!
//! A seed selects some of the cases; with `SEMPA_TEST_FULL=1` all cases are tried.

use sempa_tests::fake_criu::{self, set_behaviour};
use sempa_tests::faults::leftover_names;
use sempa_tests::requirements::require_testbed_with_own_engine;
use sempa_tests::ring_job::ENDLESS_ROUND_COUNT;
use sempa_tests::rng::{print_seed, sample_cases};
use sempa_tests::run::CommandResult;
use sempa_tests::vm::VmSettings;
use sempa_tests::{OrPanicWithLogs, Testbed, Vm, wait_for};
use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

const TIMEOUT: Duration = Duration::from_secs(120);
const WORKER_COUNT: usize = 2;

/// A job of three tasks on h1 and h2 that writes one line per round.
struct Job<'a> {
    vm: &'a Vm<'a>,
    folder: PathBuf,
    tid: String,
}

impl<'a> Job<'a> {
    fn start(vm: &'a Vm<'a>) -> Self {
        vm.compile_program("ring_job").expect("gcc");
        let folder = vm.user_home().join("ring");
        fs::create_dir_all(&folder).expect("a folder");
        let args = [
            "-h1",
            "ring_job",
            &WORKER_COUNT.to_string(),
            ENDLESS_ROUND_COUNT,
            "-2000",
            folder.to_str().expect("text"),
        ];
        let tid = vm.spawn_connected(&args).or_panic_with_logs(vm);
        let job = Job { vm, folder, tid };
        job.wait_for_rounds();
        job
    }

    /// Waits for five more rounds. All tasks contribute to each round.
    fn wait_for_rounds(&self) {
        let line_count =
            || fs::read_to_string(self.folder.join("log")).map_or(0, |log| log.lines().count());
        let required_count = line_count() + 5;
        let wait_result = wait_for(TIMEOUT, || {
            if line_count() >= required_count {
                Ok(())
            } else {
                Err(format!("{} rounds", line_count()))
            }
        });
        wait_result.or_panic_with_logs(self.vm);
    }

    fn request_checkpoint(&self) -> CommandResult {
        self.vm
            .run_pvm(&["checkpoint", &self.tid])
            .or_panic_with_logs(self.vm)
    }

    fn make_checkpoint(&self) -> String {
        let values = self.vm.pvm_json(&["checkpoint", &self.tid]);
        let values = values.or_panic_with_logs(self.vm);
        values[0]["set"].as_str().expect("a name").to_string()
    }

    /// Requests a checkpoint, which must fail; the last line on standard error must contain all
    /// `error_texts`. Checks
    /// that the job continues and that no part of the checkpoint remains. `case_name` describes the
    /// case.
    fn check_checkpoint_fails(&self, case_name: &str, error_texts: &[&str]) {
        let entries_before = store_entries(self.vm);
        let output = self.request_checkpoint();
        // The lines before report the progress.
        let last_line = output.stderr.lines().last().unwrap_or_default();
        assert!(
            !output.succeeded() && error_texts.iter().all(|text| last_line.contains(text)),
            "{case_name}: {output:?}\n{}",
            self.vm.events_and_logs()
        );
        eprintln!("{case_name}: {}", output.stderr.trim());
        self.wait_for_rounds();
        wait_until_nothing_remains(self.vm, &entries_before, case_name);
    }

    fn kill_and_wait(&self) {
        assert!(
            self.vm
                .run_pvm(&["kill", &self.tid])
                .expect("the console")
                .succeeded()
        );
        assert!(
            self.vm
                .run_pvm(&["reset"])
                .expect("the console")
                .succeeded()
        );
        let wait_result = wait_for(TIMEOUT, || {
            let tasks = self.vm.tasks().map_err(|error| error.to_string())?;
            if tasks.iter().any(|task| task.name == "ring_job") {
                Err(format!("{tasks:?}"))
            } else {
                Ok(())
            }
        });
        wait_result.or_panic_with_logs(self.vm);
    }

    /// Restarts the checkpoint `checkpoint_name`. The restart must fail with one line that contains
    /// all `error_texts`. Checks that no task runs and that no files or processes remain.
    fn check_restart_fails(&self, checkpoint_name: &str, case_name: &str, error_texts: &[&str]) {
        let entries_before = store_entries(self.vm);
        let output = self
            .vm
            .run_pvm(&["restart", checkpoint_name])
            .expect("the console");
        // The lines before report the progress.
        let last_line = output.stderr.lines().last().unwrap_or_default();
        assert!(
            !output.succeeded() && error_texts.iter().all(|text| last_line.contains(text)),
            "{case_name}: {output:?}\n{}",
            self.vm.events_and_logs()
        );
        eprintln!("{case_name}: {}", output.stderr.trim());
        for host in self.vm.testbed().hosts() {
            sempa_tests::testbed::wait_until_no_process(host, "ring_job", TIMEOUT)
                .unwrap_or_else(|error| panic!("{case_name}: {error:#}"));
        }
        wait_until_nothing_remains(self.vm, &entries_before, case_name);
    }

    fn check_restart_succeeds(&self, checkpoint_name: &str) {
        let output = self
            .vm
            .run_pvm(&["restart", checkpoint_name])
            .expect("the console");
        assert!(
            output.succeeded(),
            "{output:?}\n{}",
            self.vm.events_and_logs()
        );
        self.wait_for_rounds();
    }
}

fn store_path(vm: &Vm<'_>) -> PathBuf {
    vm.user_home().join(".local/state/sempa/checkpoints")
}

/// Returns the names of all checkpoints in the store, including incomplete ones.
fn store_entries(vm: &Vm<'_>) -> Vec<String> {
    let entries = fs::read_dir(store_path(vm)).into_iter().flatten().flatten();
    let mut names: Vec<String> = entries
        .map(|entry| entry.file_name().to_string_lossy().into_owned())
        .collect();
    names.retain(|name| name != "lock" && !name.starts_with("claim-"));
    names.sort();
    names
}

/// Waits until the store has no entries except `entries_before`, and no host has images, resume
/// tokens or an engine process.
fn wait_until_nothing_remains(vm: &Vm<'_>, entries_before: &[String], case_name: &str) {
    let wait_result = wait_for(TIMEOUT, || {
        let mut remains: Vec<String> = store_entries(vm)
            .into_iter()
            .filter(|name| !entries_before.contains(name))
            .collect();
        for host in vm.testbed().hosts() {
            remains.extend(leftover_names(host));
            let is_engine_line = |line: &String| fake_criu::is_engine_command_line(line);
            remains.extend(
                host.processes()
                    .into_iter()
                    .map(|(_, line)| line)
                    .filter(is_engine_line),
            );
        }
        if remains.is_empty() {
            Ok(())
        } else {
            Err(remains.join(", "))
        }
    });
    wait_result.unwrap_or_else(|error| panic!("{case_name}: {error:#}\n{}", vm.events_and_logs()));
}

fn with_job(
    settings: impl Fn(&Testbed) -> VmSettings,
    test: impl FnOnce(&Testbed, &Vm<'_>, &Job<'_>),
) {
    let bed = require_testbed_with_own_engine(2);
    fake_criu::install(&bed);
    let vm = Vm::start(&bed, settings(&bed)).expect("a virtual machine");
    vm.add_hosts(&["h2"]).expect("the other one joins");
    let job = Job::start(&vm);
    test(&bed, &vm, &job);
    vm.halt_and_wait().expect("halts");
}

/// Behaviours of the fake CRIU that make it fail, each with a part of the resulting error message.
const FAILING_BEHAVIOURS: [(&str, &str); 4] = [
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
    let seed = print_seed();
    with_job(
        |_| VmSettings::default(),
        |bed, _, job| {
            let valid_checkpoint = job.make_checkpoint();
            for (behaviour, expected_error) in sample_cases(FAILING_BEHAVIOURS, 1, seed) {
                set_behaviour(bed, "h2", behaviour);
                job.check_checkpoint_fails(behaviour, &["the job continues", expected_error]);
                set_behaviour(bed, "h2", "");
            }
            for kind in sample_cases(IMAGE_KINDS, 2, seed) {
                set_behaviour(bed, "h2", &format!("cut {kind}*.img"));
                let expected_error = ["the job continues", "images: ", kind];
                job.check_checkpoint_fails(&format!("{kind} cut"), &expected_error);
                set_behaviour(bed, "h2", "");
            }
            job.kill_and_wait();
            // The restart is tried with another behaviour than the checkpoint.
            for (behaviour, expected_error) in sample_cases(FAILING_BEHAVIOURS, 1, seed + 1) {
                set_behaviour(bed, "h1", behaviour);
                set_behaviour(bed, "h2", behaviour);
                job.check_restart_fails(
                    &valid_checkpoint,
                    behaviour,
                    &["none of its tasks is running", expected_error],
                );
                set_behaviour(bed, "h1", "");
                set_behaviour(bed, "h2", "");
            }
            job.check_restart_succeeds(&valid_checkpoint);
        },
    );
}

/// Path on h1 where a small file system is mounted for the store.
const SMALL_DISK_PATH: &str = "/tmp/small";

fn with_small_store(bed: &Testbed) -> VmSettings {
    let output = bed.host(1).run_shell(
        &format!("mkdir -m 700 {SMALL_DISK_PATH} && mount -t tmpfs -o size=64m,mode=700 none {SMALL_DISK_PATH}"),
        TIMEOUT,
    );
    assert!(
        output.as_ref().is_ok_and(CommandResult::succeeded),
        "{output:?}"
    );
    let env = vec![
        (
            "SEMPA_STORE".to_string(),
            format!("{SMALL_DISK_PATH}/store"),
        ),
        (
            "SEMPA_STORE_KEY".to_string(),
            format!("{SMALL_DISK_PATH}/key"),
        ),
    ];
    VmSettings {
        env,
        ..VmSettings::default()
    }
}

/// Returns the paths of all files below the folder `top_folder` of h1.
fn files_below(bed: &Testbed, top_folder: &str) -> Vec<PathBuf> {
    fn collect_files(folder: &Path, paths: &mut Vec<PathBuf>) {
        for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
            if entry.path().is_dir() {
                collect_files(&entry.path(), paths)
            } else {
                paths.push(entry.path())
            }
        }
    }
    let mut paths = Vec::new();
    collect_files(&bed.host(1).machine_path(top_folder), &mut paths);
    paths
}

fn resize_store(bed: &Testbed, size: &str) {
    let output = bed
        .host(1)
        .run_shell(
            &format!("mount -n -o remount,size={size} {SMALL_DISK_PATH}"),
            TIMEOUT,
        )
        .expect("runs");
    assert!(output.succeeded(), "{output:?}");
}

#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn a_full_or_damaged_store_keeps_older_checkpoints() {
    with_job(with_small_store, |bed, vm, job| {
        let older_checkpoint = job.make_checkpoint();
        let store_files = || {
            let mut names = files_below(bed, SMALL_DISK_PATH);
            names.sort();
            names
        };
        let files_before = store_files();
        let checkpoint_bytes: u64 = files_before
            .iter()
            .filter_map(|path| fs::metadata(path).ok())
            .map(|meta| meta.blocks() * 512)
            .sum();
        // The store becomes full at the beginning, during the dump of the first task, during the
        // dumps of the other tasks, and just before the end.
        for fraction in [0.0, 0.05, 0.3, 0.6, 0.9, 0.99] {
            resize_store(
                bed,
                &format!(
                    "{}k",
                    (checkpoint_bytes as f64 * (1.0 + fraction)) as u64 / 1024
                ),
            );
            job.check_checkpoint_fails(
                &format!("room for {fraction} of a set"),
                &["the disk is full", "the job continues"],
            );
            let wait_result = wait_for(TIMEOUT, || {
                let current_files = store_files();
                if current_files == files_before {
                    Ok(())
                } else {
                    Err(format!("{current_files:?}"))
                }
            });
            wait_result.expect("nothing is left of it");
        }
        resize_store(bed, "64m");
        let newer_checkpoint = job.make_checkpoint();
        job.kill_and_wait();
        let checkpoint_folder = format!("{SMALL_DISK_PATH}/store/{newer_checkpoint}");
        for path in files_below(bed, &checkpoint_folder) {
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
                // the file.
                fs::write(&path, b"\xffnonsense").expect("written");
                continue;
            }
            let mut changed_bytes = bytes.clone();
            changed_bytes[bytes.len() / 3] ^= 1;
            for (damage, damaged_bytes) in [
                ("changed", Some(&changed_bytes[..])),
                ("cut", Some(&bytes[..bytes.len() / 2])),
                ("missing", None),
            ] {
                match damaged_bytes {
                    Some(damaged_bytes) => fs::write(&path, damaged_bytes).expect("written"),
                    None => fs::remove_file(&path).expect("removed"),
                }
                job.check_restart_fails(&newer_checkpoint, &format!("{name} {damage}"), &[]);
                fs::write(&path, &bytes).expect("written");
                fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).expect("as it was");
            }
        }
        let list_output = vm.run_pvm(&["checkpoints"]).expect("the console");
        assert!(
            list_output.stdout.contains(&older_checkpoint)
                && list_output.stdout.contains(&newer_checkpoint),
            "{list_output:?}"
        );
        job.check_restart_succeeds(&newer_checkpoint);
        job.kill_and_wait();
        job.check_restart_succeeds(&older_checkpoint);
        job.kill_and_wait();
        // The restart has truncated the log to its length at the older checkpoint, so a restart of
        // the newer checkpoint would leave a gap in the log.
        job.check_restart_fails(
            &newer_checkpoint,
            "a log that is shorter",
            &["log has become shorter since the checkpoint", "truncate -s"],
        );
        job.check_restart_succeeds(&older_checkpoint);
    });
}

#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn an_unusable_store_key_is_named() {
    with_job(with_small_store, |bed, _, job| {
        let key_path = bed.host(1).machine_path(&format!("{SMALL_DISK_PATH}/key"));
        fs::write(&key_path, "short").expect("written");
        fs::set_permissions(&key_path, fs::Permissions::from_mode(0o600)).expect("its mode");
        job.check_checkpoint_fails(
            "a short key",
            &["cannot use the key file", "the job continues"],
        );
        fs::write(&key_path, [7; 32]).expect("written");
        fs::set_permissions(&key_path, fs::Permissions::from_mode(0o644)).expect("its mode");
        job.check_checkpoint_fails(
            "a key that others can read",
            &["cannot use the key file", "the job continues"],
        );
        fs::remove_file(&key_path).expect("removed");
        fs::create_dir(&key_path).expect("made");
        job.check_checkpoint_fails(
            "a folder for a key",
            &["cannot use the key file", "the job continues"],
        );
        fs::remove_dir(&key_path).expect("removed");
        let checkpoint_name = job.make_checkpoint();
        job.kill_and_wait();
        job.check_restart_succeeds(&checkpoint_name);
    });
}
