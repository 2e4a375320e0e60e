"""The storage types of rows: conversion to them, and the error that the conversion makes."""
