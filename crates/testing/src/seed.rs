//! Random tests that can be run again.

/// Holds the seed of a run that is to be repeated.
const VARIABLE: &str = "ONECOPY_SEED";

/// A seed: another one in each run, unless `ONECOPY_SEED` gives it. It is printed, so that a failure can be repeated.
///
/// # Panics
///
/// When the variable holds no number.
pub fn seed() -> u64 {
    let seed = match std::env::var(VARIABLE) {
        Ok(given) => given.parse().unwrap_or_else(|_| panic!("{VARIABLE}={given} is no number")),
        Err(_) => rand::random(),
    };
    eprintln!("the seed is {seed}: {VARIABLE}={seed} repeats this run");
    seed
}
