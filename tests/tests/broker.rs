//! Sessions of a foreman and workers that come and go, through the broker's programs and its C
//! library, on real hosts.

use sempa_tests::broker_vm::{
    BrokerVm, EXIT_OVER, TIMEOUT, assert_counts_add_up, compile, programs_folder,
    repository_folder, sum_of_squares, total,
};
use sempa_tests::requirements::{panic_if_unmet, require_testbed};
use sempa_tests::run::RunningCommand;
use sempa_tests::source_packages::FASTDNAML;
use sempa_tests::testbed::Host;
use sempa_tests::{OrPanicWithLogs, wait_for};
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Stdio;

/// The first member starts the broker. Members inside and outside the virtual machine work
/// together. At the end of the session all get the exit status for the end, and nothing is left.
#[test]
#[ignore = "system tier: needs root and hosts"]
fn members_inside_and_outside_work_together() {
    let bed = require_testbed(2);
    let broker = BrokerVm::start(&bed);
    let foreman = broker.start_foreman("squares", 400, 4);
    broker.wait_for_line(&foreman, "foreman is member 1");
    let file = broker.session_file("squares");
    let outside = broker.start_on(bed.outside_host(), &["broker_worker", &file, "2", "0"]);
    let inside = broker.start_on(bed.host(2), &["broker_worker", "squares", "2", "0"]);
    broker.wait_for_line(&foreman, "results 400");
    let report = broker.report("squares");
    assert_counts_add_up(&report);
    let members = report["members"].as_array().expect("members");
    let outside_count = members.iter().filter(|m| m["place"] == "outside").count();
    assert_eq!((members.len(), outside_count), (5, 2), "{report}");
    let output = broker.release(foreman);
    assert_eq!(total(&output, "sum"), sum_of_squares(400));
    broker.expect_status(outside, 0);
    broker.expect_status(inside, 0);
    broker.end();
}

/// The examples in C run as their comments say.
#[test]
#[ignore = "system tier: needs root and hosts"]
fn the_examples_in_c_run() {
    let bed = require_testbed(1);
    let broker = BrokerVm::start(&bed);
    for name in ["squares_foreman", "squares_worker"] {
        let source = repository_folder().join(format!("broker/examples/{name}.c"));
        compile(&programs_folder(&broker.vm).join(name), &[source], &[]);
    }
    let worker = broker.start_on(bed.host(1), &["squares_worker", "c"]);
    let foreman = broker.start_on(bed.host(1), &["squares_foreman", "c", "500"]);
    let result = foreman.wait_or_kill(TIMEOUT).or_panic_with_logs(&broker.vm);
    let text = format!("the sum of 500 squares is {}\n", sum_of_squares(500));
    assert_eq!((result.stdout, result.status.code()), (text, Some(0)));
    broker.expect_status(worker, EXIT_OVER);
    broker.end();
}

/// Late comers inside and outside learn that the session is over, by an exit status of its own.
#[test]
#[ignore = "system tier: needs root and hosts"]
fn late_comers_learn_that_the_session_is_over() {
    let bed = require_testbed(1);
    let broker = BrokerVm::start(&bed);
    broker.broker_succeeds(&["start", "late", "--linger", "60"]);
    let file = broker.session_file("late");
    let worker = broker.start_on(bed.outside_host(), &["broker_worker", &file, "1", "0"]);
    broker.wait_until_present("late", 1);
    broker.broker_succeeds(&["end", "late", "--within", "0"]);
    broker.expect_status(worker, EXIT_OVER);
    let late_inside = broker.start_on(bed.host(1), &["broker_worker", "late", "1", "0"]);
    broker.expect_status(late_inside, EXIT_OVER);
    let late_outside = broker.start_on(bed.outside_host(), &["broker_worker", &file, "1", "0"]);
    broker.expect_status(late_outside, EXIT_OVER);
    assert_eq!(
        broker.broker(&["members", "late"]).status.code(),
        Some(EXIT_OVER)
    );
    // The virtual machine ends while the broker still answers late comers.
    broker.vm.halt_and_wait().expect("halts");
    let leftovers = bed.host(1).leftover_files(bed.folder());
    assert_eq!(leftovers, Vec::<PathBuf>::new());
}

/// A killed broker is started again by a member, and no result is lost or counted twice.
#[test]
#[ignore = "system tier: needs root and hosts"]
fn a_killed_broker_goes_on_without_loss() {
    let bed = require_testbed(2);
    let broker = BrokerVm::start(&bed);
    broker.broker_succeeds(&["start", "killed", "--linger", "5"]);
    let foreman = broker.start_foreman("killed", 1500, 4);
    broker.wait_for_line(&foreman, "foreman is member 1");
    let file = broker.session_file("killed");
    let outside = broker.start_on(bed.outside_host(), &["broker_worker", &file, "2", "1"]);
    let inside = broker.start_on(bed.host(2), &["broker_worker", "killed", "2", "1"]);
    for progress in ["100 done", "300 done", "500 done"] {
        broker.wait_for_line(&foreman, progress);
        let pids = broker.broker_pids();
        assert_eq!(pids.len(), 1, "{pids:?}");
        let (number, pid) = pids[0];
        bed.host(number)
            .kill_matching_processes(|line| line.contains("pvm-broker serve"));
        wait_for(TIMEOUT, || match broker.broker_pids() {
            pids if pids.iter().any(|(_, new)| *new != pid) => Ok(()),
            pids => Err(format!("{pids:?}")),
        })
        .or_panic_with_logs(&broker.vm);
        broker.wait_until_present("killed", 5);
    }
    broker.wait_for_line(&foreman, "results 1500");
    let report = broker.report("killed");
    assert_counts_add_up(&report);
    assert_eq!(report["counts"]["joins"], 5, "{report}");
    assert_eq!(report["counts"]["dropped"], 0, "{report}");
    let output = broker.release(foreman);
    assert_eq!(total(&output, "sum"), sum_of_squares(1500));
    for name in ["departures", "doubled", "returned"] {
        assert_eq!(total(&output, name), 0, "{output}");
    }
    broker.expect_status(outside, 0);
    broker.expect_status(inside, 0);
    broker.end();
}

/// A worker that migrates keeps its number and its messages; nobody else notices.
#[test]
#[ignore = "system tier: needs root and hosts"]
fn a_worker_that_migrates_keeps_its_number_and_messages() {
    let bed = require_testbed(2);
    let broker = BrokerVm::start(&bed);
    let foreman = broker.start_foreman("moves", 1200, 2);
    broker.wait_for_line(&foreman, "foreman is member 1");
    let spawn = ["-h2", "broker_worker", "moves", "1", "1"];
    let tid = broker.vm.spawn_connected(&spawn).expect("spawned");
    let other = broker.start_on(bed.host(1), &["broker_worker", "moves", "1", "1"]);
    for (progress, host) in [("100 done", "h1"), ("300 done", "h2"), ("500 done", "h1")] {
        broker.wait_for_line(&foreman, progress);
        broker.vm.migrate_or_panic(&tid, host);
    }
    broker.wait_for_line(&foreman, "results 1200");
    let report = broker.report("moves");
    assert_counts_add_up(&report);
    let members = report["members"].as_array().expect("members");
    assert_eq!(members.len(), 3, "{report}");
    for member in members {
        assert_eq!(member["incarnation"], 1, "{report}");
        assert!(
            member["received"].as_u64().expect("a count") > 100,
            "{report}"
        );
    }
    let output = broker.release(foreman);
    assert_eq!(total(&output, "sum"), sum_of_squares(1200));
    for name in ["departures", "doubled", "returned"] {
        assert_eq!(total(&output, name), 0, "{output}");
    }
    broker.expect_status(other, EXIT_OVER);
    broker.end();
}

/// A member outside whose network fails is away, comes back by itself and keeps number and
/// messages. Both sides notice the dead connection.
#[test]
#[ignore = "system tier: needs root and hosts"]
fn a_member_outside_comes_back_after_a_network_failure() {
    let bed = require_testbed(2);
    // h2 is not in the virtual machine.
    let broker = BrokerVm::start_with_hosts(&bed, 1);
    broker.broker_succeeds(&[
        "start",
        "net",
        "--heartbeat",
        "1",
        "--grace",
        "100",
        "--linger",
        "5",
    ]);
    let file = broker.session_file("net");
    let foreman = broker.start_foreman("net", 400, 1);
    let worker = broker.start_on(bed.host(2), &["broker_worker", &file, "1", "1"]);
    for progress in ["50 done", "150 done"] {
        broker.wait_for_line(&foreman, progress);
        bed.set_connected(2, false).expect("disconnected");
        broker.wait_until_present("net", 1);
        bed.set_connected(2, true).expect("connected");
        broker.wait_until_present("net", 2);
    }
    broker.wait_for_line(&foreman, "results 400");
    let report = broker.report("net");
    assert_eq!(report["counts"]["joins"], 2, "{report}");
    assert_counts_add_up(&report);
    let output = broker.release(foreman);
    for name in ["departures", "doubled", "returned"] {
        assert_eq!(total(&output, name), 0, "{output}");
    }
    broker.expect_status(worker, EXIT_OVER);
    broker.end();
}

/// When the foreman is killed, workers wait for the next foreman, or the session ends: as the
/// session was started.
#[test]
#[ignore = "system tier: needs root and hosts"]
fn a_killed_foreman_ends_the_session_or_is_replaced() {
    let bed = require_testbed(1);
    let broker = BrokerVm::start(&bed);
    for policy in ["wait", "end"] {
        broker.broker_succeeds(&["start", policy, "--foreman-death", policy]);
        let worker = broker.start_on(bed.host(1), &["broker_worker", policy, "1", "1"]);
        let first = broker.start_foreman(policy, 100_000, 1);
        broker.wait_for_line(&first, "50 done");
        first.kill_children_and_wait().expect("killed");
        if policy == "wait" {
            let next = broker.start_foreman(policy, 200, 1);
            broker.wait_for_line(&next, "results 200");
            assert_eq!(total(&broker.release(next), "sum"), sum_of_squares(200));
        }
        broker.expect_status(worker, EXIT_OVER);
    }
    broker.end();
}

/// Asserts the number of gone members for each reason, all of them workers.
fn assert_gone(report: &Value, expected: &[(&str, usize)]) {
    let members = report["members"].as_array().expect("members");
    for (reason, count) in expected {
        let gone = members.iter().filter(|m| m["state"]["gone"] == *reason);
        assert_eq!(gone.count(), *count, "{reason}: {report}");
    }
}

/// 61 workers, of which each departs twice, inside and outside the virtual machine: each message is
/// received once, returned, or counted as dropped.
#[test]
#[ignore = "system tier: needs root and hosts"]
fn sixty_one_workers_with_122_departures() {
    let bed = require_testbed(2);
    let broker = BrokerVm::start(&bed);
    let options = [
        "start",
        "churn",
        "--grace",
        "1",
        "--linger",
        "5",
        "--foreman-death",
        "end",
    ];
    broker.broker_succeeds(&options);
    let file = broker.session_file("churn");
    let foreman = broker.start_foreman("churn", 4000, 61);
    let lives = ["leave:6", "kill:9"];
    let place = |host: &Host, session: &str, count: &str| {
        let arguments = ["broker_worker", session, count, "2", lives[0], lives[1]];
        broker.start_on(host, &arguments)
    };
    let groups = [
        place(bed.host(1), "churn", "20"),
        place(bed.host(2), "churn", "21"),
        place(bed.outside_host(), &file, "20"),
    ];
    broker.wait_for_line(&foreman, "results 4000");
    let report = wait_for(TIMEOUT, || {
        let report = broker.report("churn");
        let members = report["members"].as_array().ok_or("no members")?;
        let gone = members.iter().filter(|m| m["state"]["gone"].is_string());
        match gone.count() {
            122 => Ok(report),
            count => Err(format!("{count} are gone")),
        }
    })
    .or_panic_with_logs(&broker.vm);
    assert_counts_add_up(&report);
    assert_eq!(report["counts"]["joins"], 1 + 61 + 122, "{report}");
    assert_gone(&report, &[("left", 61), ("killed", 41), ("lost", 20)]);
    println!("{}", report["counts"]);
    let output = broker.release(foreman);
    println!("{output}");
    assert_eq!(total(&output, "sum"), sum_of_squares(4000));
    for group in groups {
        broker.expect_status(group, 0);
    }
    broker.end();
}

/// Returns sequences of `species` species in PHYLIP's format, evolved along a random tree.
fn make_sequences(species: usize, sites: usize) -> String {
    let mut random = sempa_tests::rng::Rng::new(7);
    let mut sequences: Vec<Vec<u8>> =
        vec![(0..sites).map(|_| b"ACGT"[random.next_below(4)]).collect()];
    while sequences.len() < species {
        let parent = random.next_below(sequences.len());
        sequences.push(sequences[parent].clone());
        for sequence in &mut sequences {
            for _ in 0..sites / 40 {
                sequence[random.next_below(sites)] = b"ACGT"[random.next_below(4)];
            }
        }
    }
    let mut text = format!("{species} {sites}\n");
    for (number, sequence) in sequences.iter().enumerate() {
        let letters = String::from_utf8_lossy(sequence);
        text.push_str(&format!("{:<10}{letters}\n", format!("s{number}")));
    }
    text
}

/// Returns the likelihood of the final tree from the output of fastDNAml, and the tree's branches
/// in order, each as the species at its end, or "" for an inner branch, and its length in units of
/// 0.00001. Inner nodes have no fixed numbers.
fn final_tree(output: &str) -> (String, Vec<(String, i64)>) {
    let likelihood = output.rfind("Ln Likelihood").expect("a result");
    let likelihood = output[likelihood..].lines().next().expect("a line");
    let branch = |line: &str| {
        let words: Vec<&str> = line.split_whitespace().collect();
        let [start, end, length, "(", ..] = words[..] else {
            return None;
        };
        start.parse::<u32>().ok()?;
        let species = if end.starts_with('s') { end } else { "" };
        let length = length.parse::<f64>().ok()? * 1e5;
        Some((species.to_string(), length.round() as i64))
    };
    let mut branches: Vec<_> = output.lines().filter_map(branch).collect();
    branches.sort();
    (likelihood.to_string(), branches)
}

/// Asserts that two trees are equal. Trees travel as text, which rounds lengths.
fn assert_same_tree(parallel: &str, sequential: &str) {
    let (parallel, sequential) = (final_tree(parallel), final_tree(sequential));
    assert_eq!(parallel.0, sequential.0);
    assert_eq!(parallel.1.len(), 37, "{parallel:?}");
    for (one, other) in parallel.1.iter().zip(&sequential.1) {
        let is_near = one.1.abs_diff(other.1) <= 2;
        assert!(one.0 == other.0 && is_near, "{one:?} and {other:?}");
    }
}

/// Compiles the sequential program, the master and the slave from fastDNAml's source, and the host.
fn build_fastdnaml(broker: &BrokerVm, source_folder: &Path) {
    let folder = programs_folder(&broker.vm);
    let shim = repository_folder().join("broker/examples/fastdnaml-shim");
    let (source, shim_source) = (source_folder.join("fastDNAml.c"), shim.join("p4_shim.c"));
    let include = format!("-I{}", shim.display());
    let old_c = ["-w", "-std=gnu99", "-O2", &include];
    let build = |name: &str, sources: &[&PathBuf], options: &[&str]| {
        let sources: Vec<PathBuf> = sources.iter().map(|path| (*path).clone()).collect();
        compile(&folder.join(name), &sources, options);
    };
    build("dnaml", &[&source], &old_c);
    build(
        "dnaml_slave",
        &[&source, &shim_source],
        &[&old_c[..], &["-DSlave=1"]].concat(),
    );
    let master_options = [&old_c[..], &["-DMaster=1", "-DSHIM_MASTER=1"]].concat();
    build("dnaml_master", &[&source, &shim_source], &master_options);
    build(
        "dnaml_host",
        &[&shim.join("dnaml_host.c")],
        &["-O2", &include],
    );
}

/// fastDNAml's own master and slaves, unmodified, find the tree that the sequential program finds,
/// while a slave is killed and another one joins from outside.
#[test]
#[ignore = "system tier: needs root and hosts"]
fn unmodified_fastdnaml_finds_the_sequential_result() {
    let bed = require_testbed(2);
    panic_if_unmet(FASTDNAML.unmet_requirement());
    FASTDNAML.unpack(bed.folder()).expect("its source");
    let source_folder = bed.folder().join("fastDNAml_1.2.2/source");
    let broker = BrokerVm::start(&bed);
    build_fastdnaml(&broker, &source_folder);
    let input = broker.vm.user_home().join("input.phy");
    fs::write(&input, make_sequences(20, 400)).expect("a file");
    let stdin = Stdio::from(fs::File::open(&input).expect("a file"));
    let sequential = RunningCommand::start(broker.command(bed.host(1), &["dnaml"]), stdin)
        .and_then(|command| command.wait_or_kill(TIMEOUT))
        .expect("the sequential program ends");

    broker.broker_succeeds(&["start", "trees", "--linger", "5"]);
    let file = broker.session_file("trees");
    let input = input.to_str().expect("UTF-8");
    let host = broker.start_on(bed.host(1), &["dnaml_host", "trees", input]);
    let start = |host: &Host, program: &str, variable: &str, value: &str| {
        let mut command = broker.command(host, &[program]);
        command.env(variable, value);
        RunningCommand::start(command, Stdio::null()).expect("starts")
    };
    let doomed = start(bed.host(2), "dnaml_slave", "SEMPA_SESSION", "trees");
    let inside = start(bed.host(2), "dnaml_slave", "SEMPA_SESSION", "trees");
    let master = start(bed.host(1), "dnaml_master", "SEMPA_SESSION", "trees");
    wait_for(TIMEOUT, || {
        let report = broker.report("trees");
        match report["counts"]["taken"].as_u64() > Some(200) {
            true => Ok(()),
            false => Err(report.to_string()),
        }
    })
    .or_panic_with_logs(&broker.vm);
    doomed.kill_children_and_wait().expect("killed");
    let outside = start(
        bed.outside_host(),
        "dnaml_slave",
        "SEMPA_SESSION_FILE",
        &file,
    );
    broker.expect_status(master, 0);
    let totals = host.wait_or_kill(TIMEOUT).or_panic_with_logs(&broker.vm);
    println!("{}", totals.stdout);
    assert!(totals.stdout.ends_with("slaves 3\n"), "{totals:?}");
    for slave in [inside, outside] {
        broker.expect_status(slave, 0);
    }
    let entries = fs::read_dir(broker.vm.user_home()).expect("a folder");
    let output = entries
        .filter_map(Result::ok)
        .find(|entry| {
            entry
                .file_name()
                .to_string_lossy()
                .starts_with("master.out.")
        })
        .expect("the master's output");
    let parallel = fs::read_to_string(output.path()).expect("a file");
    assert_same_tree(&parallel, &sequential.stdout);
    broker.end();
}
