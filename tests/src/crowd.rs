//! Starts and migrates tasks that exchange messages all the time (`tests/programs/all_to_all.c`).

use crate::rng::Rng;
use crate::run::{RunningCommand, wait_for};
use crate::vm::Vm;
use anyhow::{Context, Result, bail, ensure};
use std::collections::HashMap;
use std::io::Write;
use std::process::Stdio;
use std::time::Duration;

/// Time limit for all workers to start, and for all of them to finish.
const TIMEOUT: Duration = Duration::from_secs(240);
/// Time limit for one migration on a loaded machine.
const MIGRATION_TIMEOUT: Duration = Duration::from_secs(120);

/// The director process and its worker tasks.
#[derive(Debug)]
pub struct Crowd {
    director: RunningCommand,
    /// Tid and current host of each worker.
    pub workers: Vec<(String, String)>,
    hosts: Vec<String>,
}

/// The sum of the final reports of all workers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CrowdReport {
    /// Number of messages whose sequence number and checksum were checked.
    pub checked: u64,
    pub lost: u64,
    pub doubled: u64,
    pub disordered: u64,
    pub damaged: u64,
}

impl CrowdReport {
    /// True if every message was received once, intact and in order.
    pub fn is_faultless(&self) -> bool {
        self.checked > 0 && self.lost + self.doubled + self.disordered + self.damaged == 0
    }

    fn read(line: &str) -> Option<CrowdReport> {
        let mut account = CrowdReport::default();
        for word in line.strip_prefix("summary: ")?.split(' ') {
            let (name, value) = word.split_once('=')?;
            let value = value.parse().ok()?;
            match name {
                "checked" => account.checked = value,
                "lost" => account.lost = value,
                "doubled" => account.doubled = value,
                "disordered" => account.disordered = value,
                "damaged" => account.damaged = value,
                _ => return None,
            }
        }
        Some(account)
    }
}

impl Crowd {
    /// Compiles the program and starts `count` workers on `hosts` in turn. Each worker exchanges
    /// messages with `2 * reach` others, or with all others if `reach` is 0. `options` are further
    /// options of the program. Returns when all workers exchange messages.
    pub fn start(
        vm: &Vm<'_>,
        count: usize,
        reach: usize,
        options: &[&str],
        hosts: &[&str],
    ) -> Result<Crowd> {
        let program = vm.compile_program("all_to_all")?;
        let mut command = vm.command(vm.bed().host(1), program);
        command
            .args([
                "-n",
                &count.to_string(),
                "-k",
                &reach.to_string(),
                "-r",
                "2000",
            ])
            .args(options)
            .args(hosts);
        let director = RunningCommand::start(command, Stdio::piped())?;
        let workers = wait_for(TIMEOUT, || {
            let out = director.out_so_far().map_err(|error| error.to_string())?;
            let workers: Vec<(String, String)> = out.lines().filter_map(worker).collect();
            let silent = (0..count).find(|i| !out.contains(&format!("progress {i} ")));
            match silent {
                None if workers.len() == count => Ok(workers),
                _ => Err(format!(
                    "{} workers, {silent:?} is silent: {:?}",
                    workers.len(),
                    director.err_so_far()
                )),
            }
        })?;
        Ok(Crowd {
            director,
            workers,
            hosts: hosts.iter().map(|host| host.to_string()).collect(),
        })
    }

    /// Returns a random host among the other hosts with the fewest workers. So the workers stay
    /// evenly distributed, and the load of the hosts stays the same.
    fn choose_other_host(&self, who: usize, rng: &mut Rng) -> String {
        let there = |host: &&String| self.workers.iter().filter(|(_, at)| at == *host).count();
        let others: Vec<&String> = self
            .hosts
            .iter()
            .filter(|host| **host != self.workers[who].1)
            .collect();
        let fewest = others.iter().map(there).min();
        let emptiest: Vec<&String> = others
            .into_iter()
            .filter(|host| Some(there(host)) == fewest)
            .collect();
        emptiest[rng.below(emptiest.len())].clone()
    }

    /// Migrates `count` random workers at the same time and waits until all have arrived.
    ///
    /// # Errors
    /// A migration failed; the error has the console's output.
    pub fn migrate_random(&mut self, vm: &Vm<'_>, rng: &mut Rng, count: usize) -> Result<()> {
        let mut moves = Vec::new();
        for who in rng.choose(self.workers.len(), count) {
            let to = self.choose_other_host(who, rng);
            moves.push((who, vm.start_migrate(&self.workers[who].0, &to)?));
            self.workers[who].1 = to;
        }
        for (who, moving) in moves {
            let (tid, to) = &self.workers[who];
            let done = moving.finish(MIGRATION_TIMEOUT)?;
            // The library may not have completed the worker's previous migration. Then the
            // migration is repeated until it is accepted.
            let done = if done.succeeded() {
                done
            } else {
                vm.migrate_when_ready(tid, to)?
            };
            done.expect_success(&format!("{tid} to {to}"))?;
        }
        Ok(())
    }

    /// Migrates one worker to another host with few workers, and waits until it has arrived.
    ///
    /// # Errors
    /// The migration failed; the error has the console's output.
    pub fn migrate_to_other_host(&mut self, vm: &Vm<'_>, rng: &mut Rng, who: usize) -> Result<()> {
        let to = self.choose_other_host(who, rng);
        self.migrate_worker(vm, who, &to)
    }

    /// Migrates one worker to a host and waits until it has arrived.
    ///
    /// # Errors
    /// The migration failed; the error has the console's output.
    pub fn migrate_worker(&mut self, vm: &Vm<'_>, who: usize, to: &str) -> Result<()> {
        let tid = &self.workers[who].0;
        vm.migrate_when_ready(tid, to)?
            .expect_success(&format!("{tid} to {to}"))?;
        self.workers[who].1 = to.to_string();
        Ok(())
    }

    /// Returns the number of direct routes so far, including rings, by (worker, other worker).
    pub fn route_counts(&self) -> Result<HashMap<(usize, usize), u32>> {
        let route = |line: &str| {
            let mut words = line.strip_prefix("route ")?.split(' ');
            let pair = (words.next()?.parse().ok()?, words.next()?.parse().ok()?);
            Some((pair, words.next()?.parse().ok()?))
        };
        Ok(self
            .director
            .out_so_far()?
            .lines()
            .filter_map(route)
            .collect())
    }

    /// Waits until each worker in `who` has had more routes with every other worker than in
    /// `before`, in both directions. Returns the numbers of routes.
    pub fn wait_for_new_routes(
        &self,
        who: &[usize],
        before: &HashMap<(usize, usize), u32>,
    ) -> Result<HashMap<(usize, usize), u32>> {
        wait_for(TIMEOUT, || {
            let now = self.route_counts().map_err(|error| error.to_string())?;
            let of = |map: &HashMap<(usize, usize), u32>, pair: &(usize, usize)| {
                map.get(pair).copied().unwrap_or(0)
            };
            let all = 0..self.workers.len();
            let pairs = who
                .iter()
                .flat_map(|one| all.clone().map(move |other| (*one, other)));
            let both = pairs
                .filter(|(one, other)| one != other)
                .flat_map(|(one, other)| [(one, other), (other, one)]);
            let missing: Vec<_> = both
                .filter(|pair| of(&now, pair) <= of(before, pair))
                .collect();
            if missing.is_empty() {
                Ok(now)
            } else {
                Err(format!("no route yet: {missing:?} of {now:?}"))
            }
        })
    }

    /// Checks that all workers are on the hosts to which they were migrated.
    ///
    /// # Errors
    /// A worker is on another host, or has ended.
    pub fn check_hosts(&self, vm: &Vm<'_>) -> Result<()> {
        let tasks = vm.tasks()?;
        for (tid, host) in &self.workers {
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

    /// True while the director runs. The director ends on request or after an error.
    pub fn director_runs(&mut self) -> Result<bool> {
        Ok(self.director.poll()?.is_none())
    }

    /// Lets all workers finish and returns the sum of their reports.
    ///
    /// # Errors
    /// A report is missing.
    pub fn finish(mut self) -> Result<CrowdReport> {
        self.director
            .take_stdin()
            .context("its input is piped")?
            .write_all(b"end\n")?;
        let done = self.director.finish(TIMEOUT)?;
        match done.out.lines().find_map(CrowdReport::read) {
            Some(account) => Ok(account),
            None => {
                let reports: Vec<&str> = done
                    .out
                    .lines()
                    .filter(|line| line.starts_with("account") || line.starts_with("summary"))
                    .collect();
                bail!("no account: {}\n{reports:#?}\n{}", done.status, done.err)
            }
        }
    }
}

fn worker(line: &str) -> Option<(String, String)> {
    let words: Vec<&str> = line.strip_prefix("worker ")?.split(' ').collect();
    Some((words.get(1)?.to_string(), words.get(2)?.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_account_is_read_and_judged() {
        let good = CrowdReport::read("summary: checked=7 lost=0 doubled=0 disordered=0 damaged=0")
            .expect("one");
        assert!(good.is_faultless() && good.checked == 7);
        let bad = CrowdReport::read("summary: checked=7 lost=0 doubled=1 disordered=0 damaged=0")
            .expect("one");
        assert!(!bad.is_faultless());
        assert_eq!(
            CrowdReport::read("summary: 3 workers gave no account"),
            None
        );
    }
}
