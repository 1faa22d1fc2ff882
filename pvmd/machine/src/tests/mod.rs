//! Tests on whole virtual machines that run in one process and are determined by a seed.

mod checkpoints;
mod exit_requests;
mod faults;
mod group_members;
mod guests;
mod handoff_log;
mod hosts;
mod leases;
mod leftovers;
mod lost_master;
mod lost_waits;
mod migration;
mod owner_agent;
mod placement_query;
mod restart_engine;
mod routes;
mod scenario;
mod service_order;
mod service_tasks;
mod sim;
mod step_matrix;
mod supervision;
mod suspend;
mod tasks;
