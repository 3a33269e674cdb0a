//! What the end-to-end tests share: servers, clients, histories and their checkers.
