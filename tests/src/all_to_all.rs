//! Starts and migrates tasks that permanently exchange messages (`tests/programs/all_to_all.c`).

use crate::rng::Rng;
use crate::run::{RunningCommand, wait_for};
use crate::vm::Vm;
use anyhow::{Context, Result, bail, ensure};
use std::collections::HashMap;
use std::io::Write;
use std::process::Stdio;
use std::time::Duration;

/// Time limit for the start of all workers, for new routes, and for the end of all workers.
const WORKERS_TIMEOUT: Duration = Duration::from_secs(240);
/// Time limit for one migration on a loaded machine.
const MIGRATION_TIMEOUT: Duration = Duration::from_secs(120);

/// A job of `all_to_all`: the director process and its worker tasks.
#[derive(Debug)]
pub struct AllToAllJob {
    director: RunningCommand,
    /// Tid of each worker, and name of the host to which it was started or last migrated.
    pub workers_and_hosts: Vec<(String, String)>,
    host_names: Vec<String>,
}

/// The sum of the final reports of all workers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AllToAllReport {
    /// Number of received messages whose sequence number and checksum were checked.
    pub checked_count: u64,
    pub lost_count: u64,
    pub doubled_count: u64,
    pub disordered_count: u64,
    pub damaged_count: u64,
}

impl AllToAllReport {
    /// True if messages were checked and every message was received exactly once, intact and in
    /// order.
    pub fn is_faultless(&self) -> bool {
        self.checked_count > 0
            && self.lost_count + self.doubled_count + self.disordered_count + self.damaged_count
                == 0
    }

    fn parse_summary(line: &str) -> Option<Self> {
        let mut report = Self::default();
        for field in line.strip_prefix("summary: ")?.split(' ') {
            let (name, value) = field.split_once('=')?;
            let value = value.parse().ok()?;
            match name {
                "checked" => report.checked_count = value,
                "lost" => report.lost_count = value,
                "doubled" => report.doubled_count = value,
                "disordered" => report.disordered_count = value,
                "damaged" => report.damaged_count = value,
                _ => return None,
            }
        }
        Some(report)
    }
}

impl AllToAllJob {
    /// Compiles the program and starts `worker_count` workers, distributed round robin over
    /// `hosts`. Each worker exchanges messages with `2 * neighbour_reach` workers, or with all
    /// workers if `neighbour_reach` is 0. `options` are further options of the program. Returns
    /// when all workers exchange messages.
    pub fn start(
        vm: &Vm<'_>,
        worker_count: usize,
        neighbour_reach: usize,
        options: &[&str],
        hosts: &[&str],
    ) -> Result<Self> {
        let program = vm.compile_program("all_to_all")?;
        let mut command = vm.user_command(vm.testbed().host(1), program);
        command
            .args([
                "-n",
                &worker_count.to_string(),
                "-k",
                &neighbour_reach.to_string(),
                "-r",
                "2000",
            ])
            .args(options)
            .args(hosts);
        let director = RunningCommand::start(command, Stdio::piped())?;
        let workers = wait_for(WORKERS_TIMEOUT, || {
            let out = director
                .stdout_so_far()
                .map_err(|error| error.to_string())?;
            let workers: Vec<(String, String)> = out.lines().filter_map(parse_worker).collect();
            let silent_worker =
                (0..worker_count).find(|i| !out.contains(&format!("progress {i} ")));
            match silent_worker {
                None if workers.len() == worker_count => Ok(workers),
                _ => Err(format!(
                    "{} workers, {silent_worker:?} is silent: {:?}",
                    workers.len(),
                    director.stderr_so_far()
                )),
            }
        })?;
        Ok(Self {
            director,
            workers_and_hosts: workers,
            host_names: hosts.iter().map(|host| host.to_string()).collect(),
        })
    }

    /// Returns a host that is not the host of worker `worker`: a random one of the hosts with the
    /// fewest workers. Therefore the workers stay evenly distributed over the hosts.
    fn choose_other_host(&self, worker: usize, rng: &mut Rng) -> String {
        let worker_count = |host: &&String| {
            self.workers_and_hosts
                .iter()
                .filter(|(_, worker_host)| worker_host == *host)
                .count()
        };
        let other_hosts: Vec<&String> = self
            .host_names
            .iter()
            .filter(|host| **host != self.workers_and_hosts[worker].1)
            .collect();
        let count_min = other_hosts.iter().map(worker_count).min();
        let candidates: Vec<&String> = other_hosts
            .into_iter()
            .filter(|host| Some(worker_count(host)) == count_min)
            .collect();
        candidates[rng.next_below(candidates.len())].clone()
    }

    /// Migrates `worker_count` random workers at the same time and waits until all migrations are
    /// complete.
    ///
    /// # Errors
    /// A migration failed; the error contains the console's output.
    pub fn migrate_random_workers(
        &mut self,
        vm: &Vm<'_>,
        rng: &mut Rng,
        worker_count: usize,
    ) -> Result<()> {
        let mut migrations = Vec::new();
        for worker in rng.choose_different(self.workers_and_hosts.len(), worker_count) {
            let target = self.choose_other_host(worker, rng);
            migrations.push((
                worker,
                vm.start_migration(&self.workers_and_hosts[worker].0, &target)?,
            ));
            self.workers_and_hosts[worker].1 = target;
        }
        for (worker, console) in migrations {
            let (tid, target) = &self.workers_and_hosts[worker];
            let result = console.wait_or_kill(MIGRATION_TIMEOUT)?;
            // The console refuses the migration if the library has not completed the worker's
            // previous migration. The migration is then requested again until the console accepts
            // it.
            let result = if result.succeeded() {
                result
            } else {
                vm.migrate_when_ready(tid, target)?
            };
            result.expect_success(&format!("{tid} to {target}"))?;
        }
        Ok(())
    }

    /// Migrates the worker with the index `worker` to another host with few workers, and waits for
    /// the end of the migration.
    ///
    /// # Errors
    /// The migration failed; the error contains the console's output.
    pub fn migrate_to_other_host(
        &mut self,
        vm: &Vm<'_>,
        rng: &mut Rng,
        worker: usize,
    ) -> Result<()> {
        let target = self.choose_other_host(worker, rng);
        self.migrate_worker(vm, worker, &target)
    }

    /// Migrates the worker with the index `worker` to the host `target` and waits for the end of
    /// the migration.
    ///
    /// # Errors
    /// The migration failed; the error contains the console's output.
    pub fn migrate_worker(&mut self, vm: &Vm<'_>, worker: usize, target: &str) -> Result<()> {
        let tid = &self.workers_and_hosts[worker].0;
        vm.migrate_when_ready(tid, target)?
            .expect_success(&format!("{tid} to {target}"))?;
        self.workers_and_hosts[worker].1 = target.to_string();
        Ok(())
    }

    /// Returns the number of direct routes and rings that were established so far, by (index of the
    /// reporting worker, index of its peer).
    pub fn route_counts(&self) -> Result<HashMap<(usize, usize), u32>> {
        let parse_count = |line: &str| {
            let mut numbers = line.strip_prefix("route ")?.split(' ');
            let pair = (numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?);
            Some((pair, numbers.next()?.parse().ok()?))
        };
        Ok(self
            .director
            .stdout_so_far()?
            .lines()
            .filter_map(parse_count)
            .collect())
    }

    /// Waits until each worker in `workers` has established more routes with every other worker
    /// than in `counts_before`, in both directions. Returns the new numbers of routes.
    pub fn wait_for_new_routes(
        &self,
        workers: &[usize],
        counts_before: &HashMap<(usize, usize), u32>,
    ) -> Result<HashMap<(usize, usize), u32>> {
        wait_for(WORKERS_TIMEOUT, || {
            let counts = self.route_counts().map_err(|error| error.to_string())?;
            let count_of = |counts_by_pair: &HashMap<(usize, usize), u32>,
                            pair: &(usize, usize)| {
                counts_by_pair.get(pair).copied().unwrap_or(0)
            };
            let all_workers = 0..self.workers_and_hosts.len();
            let pairs = workers
                .iter()
                .flat_map(|worker| all_workers.clone().map(move |peer| (*worker, peer)));
            let directed_pairs = pairs
                .filter(|(worker, peer)| worker != peer)
                .flat_map(|(worker, peer)| [(worker, peer), (peer, worker)]);
            let missing_pairs: Vec<_> = directed_pairs
                .filter(|pair| count_of(&counts, pair) <= count_of(counts_before, pair))
                .collect();
            if missing_pairs.is_empty() {
                Ok(counts)
            } else {
                Err(format!("no route yet: {missing_pairs:?} of {counts:?}"))
            }
        })
    }

    /// Checks that all workers are on the hosts to which they were migrated.
    ///
    /// # Errors
    /// A worker is on another host, or has ended.
    pub fn check_worker_hosts(&self, vm: &Vm<'_>) -> Result<()> {
        let tasks = vm.tasks()?;
        for (tid, host) in &self.workers_and_hosts {
            let task = tasks
                .iter()
                .find(|task| task.tid == *tid)
                .with_context(|| format!("{tid} is gone"))?;
            ensure!(
                task.host.as_ref() == Some(host),
                "{tid} is not on {host}: {task:?}"
            );
        }
        Ok(())
    }

    /// True while the director runs. The director ends after [`AllToAllJob::end_and_report`] or
    /// after an error.
    pub fn is_director_running(&mut self) -> Result<bool> {
        Ok(self.director.poll_status()?.is_none())
    }

    /// Requests the end of all workers, waits for it, and returns the sum of their reports.
    ///
    /// # Errors
    /// A report is missing.
    pub fn end_and_report(mut self) -> Result<AllToAllReport> {
        self.director
            .take_stdin()
            .context("its input is piped")?
            .write_all(b"end\n")?;
        let result = self.director.wait_or_kill(WORKERS_TIMEOUT)?;
        match result
            .stdout
            .lines()
            .find_map(AllToAllReport::parse_summary)
        {
            Some(report) => Ok(report),
            None => {
                let report_lines: Vec<&str> = result
                    .stdout
                    .lines()
                    .filter(|line| line.starts_with("account") || line.starts_with("summary"))
                    .collect();
                bail!(
                    "no account: {}\n{report_lines:#?}\n{}",
                    result.status,
                    result.stderr
                )
            }
        }
    }
}

fn parse_worker(line: &str) -> Option<(String, String)> {
    let fields: Vec<&str> = line.strip_prefix("worker ")?.split(' ').collect();
    Some((fields.get(1)?.to_string(), fields.get(2)?.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn report_with_a_doubled_message_is_not_faultless() {
        let faultless_report = AllToAllReport::parse_summary(
            "summary: checked=7 lost=0 doubled=0 disordered=0 damaged=0",
        )
        .expect("one");
        assert!(faultless_report.is_faultless() && faultless_report.checked_count == 7);
        let faulty_report = AllToAllReport::parse_summary(
            "summary: checked=7 lost=0 doubled=1 disordered=0 damaged=0",
        )
        .expect("one");
        assert!(!faulty_report.is_faultless());
        assert_eq!(
            AllToAllReport::parse_summary("summary: 3 workers gave no account"),
            None
        );
    }
}
